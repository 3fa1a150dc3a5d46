# The bare program and its tests: without CUDA, NCCL, CUPTI, OpenSSL and MPI, as on a machine that has none.
# What a build without them has otherwise is compiled a second time, and linked with the other objects of this build.
# Of the tests, those whose groups are named below depend on these parts. The libraries are given as files, without what
# they need themselves: if an object refers to CUDA code, the bare program is not linked.
foreach(list engine_sources kernel_sources tool_sources library_sources)
  get_property(bare_${list} GLOBAL PROPERTY bare_${list})
endforeach()
if(bare_engine_sources OR bare_kernel_sources)
  add_library(triad_bare OBJECT ${bare_engine_sources} ${bare_kernel_sources} ${bare_tool_sources})
  target_link_libraries(triad_bare PRIVATE triad_flags)
  target_include_directories(triad_bare PRIVATE ${CBLAS_INCLUDE})
  set(bare_libraries triad_cases triad_train triad_model triad_kernels triad_io triad_engine)
  list(TRANSFORM bare_libraries REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE bare_files)
  list(TRANSFORM bare_library_sources REPLACE ".*/" "" OUTPUT_VARIABLE replaced)
  list(APPEND replaced device_cuda.cpp)
  list(JOIN replaced "|" replaced)
  set(replaced "/bench/kernel_trace_cupti|/triad_nsa_objects[.]dir/(.*/)?(${replaced})[.]o$")
  # triad_bare_program(NAME TARGETS...): adds the program bare/NAME of these targets' objects, but for what is replaced.
  function(triad_bare_program name)
    list(TRANSFORM ARGN REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
    add_executable(bare_${name} "$<FILTER:${objects},EXCLUDE,${replaced}>" $<TARGET_OBJECTS:triad_bare>)
    set_target_properties(bare_${name} PROPERTIES OUTPUT_NAME ${name} LINKER_LANGUAGE CXX LINK_DEPENDS "${bare_files}"
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bare)
    target_link_libraries(bare_${name} PRIVATE triad_flags ${bare_files} ZLIB::ZLIB ${PCRE2_LIBRARY} ${UTF8PROC_LIBRARY}
      ${ZSTD_LIBRARY} ${OPENBLAS_LIBRARY} ${CMAKE_DL_LIBS})
    add_dependencies(bare_${name} ${bare_libraries})
  endfunction()
  triad_bare_program(triad triad triad_first_verbs)
  triad_bare_program(triad_tests triad_tests triad_nsa_objects)
  target_sources(bare_triad_tests PRIVATE ${bare_library_sources})
  target_link_libraries(bare_triad_tests PRIVATE ${catch2})
  add_dependencies(bare_triad_tests bare_triad)
  set(groups [build] [fit] [recompute] [routes] [bad-input] [secret])
  list(TRANSFORM groups APPEND "~[gpu]")
  list(JOIN groups "," groups)
  catch_discover_tests(bare_triad_tests TEST_PREFIX "bare/" TEST_SPEC ${groups} PROPERTIES ${test_properties})
endif()
