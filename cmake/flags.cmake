# The compile flags of every target, and the functions with which the floors declare their targets.
add_library(triad_flags INTERFACE)
target_include_directories(triad_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_link_libraries(triad_flags INTERFACE fmt::fmt OpenMP::OpenMP_CXX)
target_compile_options(triad_flags INTERFACE
  # -Wno-restrict: gcc 12 warns of overlapping copies in std::string's operator+ that do not exist (GCC bug 105651).
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow=local;-Werror;-Wno-restrict;-fno-math-errno;-fno-trapping-math>
  $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;-Xcompiler=-Wall;--expt-relaxed-constexpr;-lineinfo>)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64 AND TRIAD_MARCH)
  target_compile_options(triad_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${TRIAD_MARCH}>)
endif()
if(TRIAD_SANITIZE)
  set(sanitize -fsanitize=${TRIAD_SANITIZE} -fno-omit-frame-pointer)
  if(NOT TRIAD_SANITIZE STREQUAL thread)
    list(APPEND sanitize -fno-sanitize-recover=all)
  endif()
  # With sanitizers gcc 13 warns of uninitialised variables in its own <regex> and <functional>.
  target_compile_options(triad_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize};-Wno-maybe-uninitialized>)
  target_link_options(triad_flags INTERFACE ${sanitize})
endif()

# Lists of sources are relative to their CMakeLists.txt, so that the path of the checkout never decides which are chosen.
# triad_glob(LIST patterns...): sets LIST to the files that match, in all folders below.
function(triad_glob list)
  file(GLOB_RECURSE found CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${ARGN})
  set(${list} ${found} PARENT_SCOPE)
endfunction()
# triad_compile_bare(LIST files...): adds files of this folder to those of the global property bare_LIST, which
# tests/bare.cmake compiles for the bare program.
function(triad_compile_bare list)
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(GLOBAL APPEND PROPERTY bare_${list} ${ARGN})
endfunction()

# triad_compile_bare_choices(LIST): the same for the files of LIST that choose between CPU and GPU code
# (kBuiltWithCuda in engine/backend.h).
function(triad_compile_bare_choices list)
  foreach(file ${${list}})
    if(file MATCHES "\\.cpp$")
      file(STRINGS ${file} found REGEX kBuiltWithCuda LIMIT_COUNT 1)
      if(found)
        triad_compile_bare(${list} ${file})
      endif()
    endif()
  endforeach()
endfunction()

# triad_either(LIST CONDITION THEN files... ELSE files...): keeps one group of files in LIST and removes the other. The
# second group is for builds without an optional part; where a build has the part, the bare program (tests/bare.cmake) takes it.
function(triad_either list condition)
  cmake_parse_arguments(arg "" "" "THEN;ELSE" ${ARGN})
  foreach(file ${arg_THEN} ${arg_ELSE})
    if(NOT file IN_LIST ${list})
      message(FATAL_ERROR "${CMAKE_CURRENT_SOURCE_DIR} has no ${file}, which its CMakeLists.txt names")
    endif()
  endforeach()
  if(${condition})
    list(REMOVE_ITEM ${list} ${arg_ELSE})
    triad_compile_bare(${list} ${arg_ELSE})
  else()
    list(REMOVE_ITEM ${list} ${arg_THEN})
  endif()
  set(${list} ${${list}} PARENT_SCOPE)
endfunction()

# triad_library(name sources...): adds the static library triad_NAME, one for each top folder.
function(triad_library name)
  add_library(triad_${name} STATIC ${ARGN})
  target_link_libraries(triad_${name} PUBLIC triad_flags)
endfunction()

# triad_shareable(targets...): compiles for use in libtriad_nsa.so too. Hidden visibility keeps position-independent code
# as fast as that of the program: calls within a library stay direct.
function(triad_shareable)
  set_target_properties(${ARGN} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# triad_optimize_less(target): compiles with -Og, which takes half the time of -O3. For train/, tools/ and tests/: they
# compute nothing themselves but call engine/, kernels/, io/ and model/.
function(triad_optimize_less target)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-Og>)
endfunction()

# triad_precompile(target headers...): compiles large headers of libraries once instead of in each file, which saves a
# fifth of the time. Files still include what they use: -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DTRIAD_UNITE=OFF shows where
# one does not.
function(triad_precompile target)
  target_precompile_headers(${target} PRIVATE ${ARGN} <nlohmann/json.hpp> <fmt/format.h> <filesystem> <functional> <thread>)
endfunction()

# triad_unite(target [EXCEPT folders...]): compiles the files of a folder together, at most six at a time, which takes a
# third to half of the time: templates of their headers are instantiated once. So names in unnamed namespaces differ within
# a folder. -DTRIAD_UNITE=OFF compiles each file by itself. Not for files that the bare program (tests/bare.cmake) replaces.
function(triad_unite target)
  cmake_parse_arguments(arg "" "" "EXCEPT" ${ARGN})
  if(NOT TRIAD_UNITE)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(file ${sources})
    cmake_path(GET file PARENT_PATH folder)
    if(file MATCHES "^[^$/].*\\.cpp$" AND NOT folder IN_LIST arg_EXCEPT)
      string(MAKE_C_IDENTIFIER "${target}_${folder}" group)
      list(APPEND ${group} ${file})
      list(LENGTH ${group} count)
      math(EXPR part "(${count} - 1) / 6")
      set_source_files_properties(${file} PROPERTIES UNITY_GROUP "${group}_${part}")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
