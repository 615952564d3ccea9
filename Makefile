# What to type. Everything is built by CMake (CMakePresets.json); this file adds the Debian packages and the order.
#
#   make         the program: build/release/dosa
#   make demo    builds it and runs the main job on a shipped trace
#   make test    every test: release, sanitizers, fuzzers
#   make check   the release tests only, for a quick answer
#   make format  clang-format over the sources
#   make lint    clang-tidy over the library and the program

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
flags := $(if $(CI),-DDOSA_WERROR=ON)

build_packages := g++ cmake ninja-build libhwy-dev libtbb-dev libexpected-dev libfmt-dev nlohmann-json3-dev libcli11-dev
test_packages := $(build_packages) ccache libgtest-dev librapidcheck-dev clang-19 libclang-rt-19-dev \
  python3 python3-dev python3-venv chromium
lint_packages := $(test_packages) clang-tidy-19 clang-format-19

all: program
.PHONY: all program demo test check format lint clean

program:
	@tools/need $(build_packages)
	cmake --preset release -DDOSA_TESTS=OFF $(flags)
	cmake --build --preset release -j $(JOBS)

demo: program
	@tools/demo build/release/dosa traces/demo-h32.safetensors

# One ctest call over all the trees, so that the last line speaks for everything.
test:
	@tools/need $(test_packages)
	cmake --preset release -DDOSA_TESTS=ON $(flags) $(if $(CI),-DDOSA_CUDA=ON)
	cmake --build --preset release -j $(JOBS)
	cmake --preset asan $(flags)
	cmake --build --preset asan -j $(JOBS)
	cmake --preset tsan $(flags)
	cmake --build --preset tsan -j $(JOBS)
	cmake --preset fuzz -DDOSA_FUZZ_SECONDS=$(FUZZ_SECONDS) $(flags)
	cmake --build --preset fuzz -j $(JOBS)
	@echo 'subdirs(release asan tsan fuzz)' > build/CTestTestfile.cmake
	ctest --test-dir build --output-on-failure -j $(JOBS)

check:
	@tools/need $(test_packages)
	cmake --preset release -DDOSA_TESTS=ON $(flags)
	cmake --build --preset release -j $(JOBS)
	ctest --preset release -j $(JOBS)

format:
	@tools/need $(lint_packages)
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | xargs clang-format-19 -i

lint:
	@tools/need $(lint_packages)
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | xargs clang-format-19 --dry-run --Werror
	cmake --preset dev $(flags)
	git ls-files 'src/*.cpp' 'cli/*.cpp' | xargs -P $(JOBS) -n 1 clang-tidy-19 -p build/dev --quiet

clean:
	rm -rf build
