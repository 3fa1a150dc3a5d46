# The libraries that Triad uses. Optional ones are enabled if they are found; cmake/summary.cmake lists them.
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Catch2 REQUIRED)  # version 2 on Debian 12, version 3 on Ubuntu 24.04
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(ZLIB REQUIRED)
# triad_need(NAME library header package): sets NAME_LIBRARY and NAME_INCLUDE, or stops with an error that names the
# package to install.
function(triad_need name library header package)
  find_library(${name}_LIBRARY ${library})
  find_path(${name}_INCLUDE ${header})
  if(NOT ${name}_LIBRARY OR NOT ${name}_INCLUDE)
    message(FATAL_ERROR "${header} or lib${library} was not found: install the package ${package} (tools/install.sh does)")
  endif()
endfunction()
triad_need(PCRE2 pcre2-8 pcre2.h libpcre2-dev)  # regular expressions, for the pretokenizers
triad_need(UTF8PROC utf8proc utf8proc.h libutf8proc-dev)  # Unicode normal forms
triad_need(ZSTD zstd zstd.h libzstd-dev)
find_library(OPENBLAS_LIBRARY openblas REQUIRED)  # by name, because the generic libblas is much slower
find_path(CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas openblas-openmp openblas-pthread
          HINTS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE} REQUIRED)

if(NOT TRIAD_CUDA STREQUAL OFF)
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real 80-virtual)
  elseif(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "90|all|native")
    # Without this the compute_80 code would run on Hopper, but launches there use clusters and other features of sm_90.
    list(APPEND CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(TRIAD_WITH_CUDA ON)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 has no entry for C++20 with this nvcc
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
  elseif(TRIAD_CUDA STREQUAL ON)
    message(FATAL_ERROR "TRIAD_CUDA is ON, but no CUDA compiler (nvcc) was found")
  endif()
endif()
if(TRIAD_WITH_CUDA)  # only the header is needed: NCCL's library is opened at run time
  find_path(NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
endif()
find_package(MPI QUIET COMPONENTS CXX)
find_package(OpenSSL QUIET COMPONENTS Crypto)  # optional: HMACs for TRIAD_SECRET (engine/comm/hmac.h)
if(TARGET OpenSSL::Crypto)
  set(TRIAD_WITH_OPENSSL ON)
endif()
if(TRIAD_WITH_CUDA)  # for `triad bench step`, which opens the library at run time
  find_path(CUPTI_INCLUDE cupti.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/include)
  find_library(CUPTI_LIBRARY cupti HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/lib64)
  if(CUPTI_INCLUDE AND CUPTI_LIBRARY)
    set(TRIAD_WITH_CUPTI ON)
  endif()
endif()
