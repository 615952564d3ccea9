# Flags of every translation unit. The bits of a score are part of the contract, hence:
# - no fused multiply-add that the source does not ask for (GCC and clang contract by default);
# - no -ffast-math and no relative of it;
# - no -march=native: Highway compiles each kernel for several instruction sets and picks at run time.
add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off>)  # nvcc: Cuda.cmake

if(DOSA_SANITIZE)
  add_compile_options(-fsanitize=${DOSA_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${DOSA_SANITIZE})
  if(DOSA_SANITIZE MATCHES undefined)
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()

if(DOSA_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)  # coverage feedback; only fuzzers link libFuzzer's main
endif()

if(PROJECT_IS_TOP_LEVEL)
  # Signed/unsigned mixes are left out: sizes of views are int64, sizes of containers are size_t.
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion>"
                      $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor> $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>)
  if(DOSA_WERROR AND NOT DOSA_SANITIZE)  # instrumented code makes the compilers warn about what is not there
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
  endif()
endif()
