# cmake --install: the program, and the library with its header, CMake package and pkg-config file.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(library_folder ${PROJECT_SOURCE_DIR}/kernels/library)
set_target_properties(triad PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS triad RUNTIME COMPONENT program)
if(TARGET triad_mpi)  # the program looks for it in its own folder
  install(TARGETS triad_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()
install(TARGETS triad_nsa EXPORT triad_nsaTargets LIBRARY COMPONENT library NAMELINK_COMPONENT library)
install(FILES ${library_folder}/triad_nsa.h TYPE INCLUDE COMPONENT library)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/triad_nsa)
install(EXPORT triad_nsaTargets NAMESPACE triad_nsa:: DESTINATION ${package_folder} COMPONENT library)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/triad_nsaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${library_folder}/triad_nsaConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/triad_nsaConfigVersion.cmake
  DESTINATION ${package_folder} COMPONENT library)
file(RELATIVE_PATH prefix_from_pc /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${library_folder}/triad_nsa.pc.in triad_nsa.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/triad_nsa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
