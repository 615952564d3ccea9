# cmake -D build=<build tree> -D source=<repository> -D work=<scratch> -P check.cmake
# Installs the build, builds the examples against the installed package alone, and compares what they print.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${build} --prefix ${work}/prefix)
run(${CMAKE_COMMAND} -S ${source}/examples -B ${work}/build -G ${generator} -DCMAKE_PREFIX_PATH=${work}/prefix
    -DCMAKE_C_COMPILER=${c_compiler} -DCMAKE_CXX_COMPILER=${cxx_compiler})
run(${CMAKE_COMMAND} --build ${work}/build)

set(expected "27 999\n54 998\n81 997\n108 996\n")
foreach(example select-cpp select-c)
  execute_process(COMMAND ${work}/build/${example} OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
  if(NOT printed STREQUAL expected)
    message(FATAL_ERROR "${example} printed\n${printed}instead of\n${expected}")
  endif()
endforeach()
