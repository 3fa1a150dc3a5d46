# find_package(triad_nsa) defines the imported target triad_nsa::triad_nsa.
include("${CMAKE_CURRENT_LIST_DIR}/triad_nsaTargets.cmake")
