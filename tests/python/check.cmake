# cmake -D python=<interpreter> -D source=<repository> -D work=<scratch> ... -P check.cmake
# The compilers and flags are those of the calling build tree, so that ccache has most objects already.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(venv ${work}/.venv)
run(${python} -m venv ${venv})
run(${venv}/bin/python -m pip install --quiet "scikit-build-core>=0.11" "nanobind>=2.4" ninja)
run(${venv}/bin/python -m pip install --quiet --no-build-isolation "${source}[report,test]"
    --config-settings=build-dir=${work}/build
    --config-settings=cmake.define.DOSA_CUDA=OFF
    --config-settings=cmake.define.DOSA_WERROR=${werror}
    --config-settings=cmake.define.CMAKE_C_COMPILER=${c_compiler}
    --config-settings=cmake.define.CMAKE_CXX_COMPILER=${cxx_compiler})
run(${CMAKE_COMMAND} -E chdir ${work} ${venv}/bin/python -m pytest -q -c ${source}/pyproject.toml --rootdir ${source}
    -p no:cacheprovider ${source}/tests/python)
