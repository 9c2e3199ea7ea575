# moe.c: `make demo` trains, `make test` proves, `make help` lists the rest.

# cpu; cuda: NVIDIA GPUs; emu: the CUDA sources on the CPU, for tests (tests/emu)
BACKEND ?= cpu
BUILD ?= $(if $(filter cpu,$(BACKEND)),build,build/$(if $(filter emu,$(BACKEND)),cuda-emu,$(BACKEND)))
CC    ?= gcc
ifeq ($(origin CC),default)
CC     = gcc
endif
MPI   ?= 1
REAL  ?= $(if $(filter cuda,$(BACKEND)),bf16,float)
OPT   ?= -O3 -g
SAN   ?=

WARN     = -Wall -Wextra -Werror -Wshadow -Wvla
# The -fno- pair changes no result (nobody here reads errno after sqrt, or the FP exception flags); without it no loop with a
# square root, an exp or a select is vectorised: kernels/cpu is up to six times slower.
BASE     = -std=c11 -D_GNU_SOURCE $(WARN) $(OPT) -fopenmp -ffp-contract=fast -fno-math-errno -fno-trapping-math $(SAN)
CFLAGS   = $(BASE) -I. -MMD -MP -DBACKEND_$(BACKEND) $(REAL_$(REAL)) $(if $(filter 1,$(MPI)),-DUSE_MPI $(MPI_CFLAGS))
REAL_double = -DREAL_DOUBLE
REAL_bf16   = -DREAL_BF16
LIBS     = $(LIBS_$(BACKEND)) -ljansson $(if $(filter 1,$(MPI)),$(MPI_LIBS)) -lm -lpthread
GIT     := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

# One short line per file; V=1 shows the commands.
say = $(if $(V),,@echo '$(1)  $(2)';)

# A .cu file goes through nvcc, for A100 (with PTX for what comes after) and Hopper; or through g++ against tests/emu/include. No
# fast-math in either. A register spill is an error, but not in the fp32 build, whose products are for checks, nor in plan.cu, where
# large functions are called and what a call saves counts as spilled.
CUDA       ?= $(firstword $(patsubst %/bin/nvcc,%,$(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null)) /usr/local/cuda)
NVCC       ?= $(CUDA)/bin/nvcc
CUDA_ARCHS ?= -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a
CXX_WARN    = -Wall -Wextra -Wno-missing-field-initializers -Wno-unused-function
CU_FLAGS    = -std=c++17 -I. -MMD -MP $(REAL_$(REAL)) $(if $(filter 1,$(NCCL)),-DUSE_NCCL)
# between nodes; 0 where it is not installed: one node then
NCCL       ?= $(if $(filter emu,$(BACKEND))$(wildcard $(CUDA)/include/nccl.h /usr/include/nccl.h),1,0)
CU_cuda     = $(NVCC) $(CU_FLAGS) -O3 -lineinfo $(CUDA_ARCHS) $(if $(filter bf16,$(REAL)),$(if $(filter %/plan.cu,$<),,-Xptxas -warn-spills$(comma)-Werror)) -Xcompiler "$(strip $(subst $(empty) ,$(comma),$(CXX_WARN)))"
CU_emu      = $(EMU_CXX) $(CU_FLAGS) -Itests/emu/include -DDEV_WORK_MIB=1 -D_GNU_SOURCE $(CXX_WARN) -Werror -Wno-unknown-pragmas -O2 -fno-strict-aliasing -g -ffp-contract=fast $(SAN) -x c++
EMU_CXX    ?= g++
LIBS_cuda   = -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcudart -lcublas -ldl -lstdc++
LIBS_emu    = -lstdc++
comma      := ,
empty      :=

programs = $(filter-out $(if $(filter-out cpu,$(BACKEND)),topoep/calibrate moe/overlap) $(if $(filter emu,$(BACKEND)),kernels/bench),$(tools))
tools    = $(basename $(wildcard train/train.c train/generate.c data/prepare.c topoep/plan.c topoep/replay.c topoep/calibrate.c moe/overlap.c kernels/bench.c))
# what ranks on the host are made of, with every backend
hosts    = $(wildcard kernels/*.c kernels/cpu/comm_mpi.c kernels/cpu/comm_threads.c topoep/*.c moe/*.c model/*.c data/*.c train/*.c)
sources  = $(filter-out $(tools:%=%.c),$(hosts) $(if $(filter cpu,$(BACKEND)),$(wildcard kernels/cpu/*.c)))
cu       = $(if $(filter-out cpu,$(BACKEND)),$(wildcard kernels/cuda/*.cu)) $(if $(filter emu,$(BACKEND)),$(wildcard tests/emu/*.cc))
objects  = $(sort $(sources:%.c=$(BUILD)/obj/%.o)) $(addprefix $(BUILD)/obj/,$(addsuffix .o,$(basename $(cu))))
tests    = $(patsubst tests/%.c,$(BUILD)/%,$(filter-out $(if $(filter-out cpu,$(BACKEND)),tests/test_cpu_%),$(wildcard tests/test_*.c))) $(if $(filter-out cpu,$(BACKEND)),$(cu_tests)) $(if $(filter emu,$(BACKEND)),$(patsubst tests/emu/%.cu,$(BUILD)/%,$(wildcard tests/emu/test_*.cu)))
cu_tests = $(patsubst tests/cuda/%.c,$(BUILD)/%,$(wildcard tests/cuda/test_*.c))
# a test of a GPU ends as skipped where there is none
skip     = $(if $(filter cuda,$(BACKEND)),$(BUILD)/obj/tests/cuda/skip.o)
oracles  = $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/ref/*.c tests/common/*.c))

all: $(addprefix $(BUILD)/,$(notdir $(programs)))

help:
	@echo "make            build/train, generate, prepare, plan, replay, calibrate, overlap, bench (CPU)"
	@echo "make demo       set up, build, train on four ranks for about 3 minutes, sample"
	@echo "make test       set up, build, run every test"
	@echo "make asan       the same tests under the address and undefined-behaviour sanitizers"
	@echo "make bench      ops and whole training steps against this machine's own ceilings (4 minutes)"
	@echo "make info       what was probed, how, and what was found"
	@echo "make BACKEND=cuda  build/cuda/train for NVIDIA GPUs, in bf16"
	@echo "make test-emu   the CUDA backend's tests on the CPU"
	@echo "make clean      removes build folders"
	@echo "Variables: MPI=0 (one process, no Open MPI)  REAL=double|float|bf16  BUILD=folder  CC=compiler  OPT=flags  V=1"

# ---- set-up -----------------------------------------------------------------------------------------------------------
PROBE = $(BUILD)/probe-$(notdir $(firstword $(CC)))-$(MPI).mk
$(PROBE): scripts/probe.sh
	@mkdir -p $(@D)
	@scripts/probe.sh $@ "$(CC)" "$(BASE)" $(MPI)
ifeq ($(filter clean help deps asan test test-emu demo,$(MAKECMDGOALS)),)
include $(PROBE)
endif
deps:
	@scripts/deps.sh
	@grep -ls '^MISSING' build*/probe-*.mk | xargs -r rm -f # probe again: it may be there now
info: $(PROBE)
	@cat $(PROBE:.mk=.log)
	@echo "build      $(CC) $(CFLAGS)"
	@echo "link       $(LIBS)"
	@[ -z "$(MISSING)" ] || echo "missing    $(MISSING)  (scripts/deps.sh installs it)"

# ---- build ------------------------------------------------------------------------------------------------------------
# What the flags were when the folder was last built: other flags, another build.
$(BUILD)/flags: force
	@mkdir -p $(@D)
	@if [ -n "$(MISSING)" ]; then \
	    echo "missing: $(MISSING). scripts/deps.sh installs it, make info says what was tried" >&2; rm -f $(PROBE); exit 2; fi
	@case "$(BACKEND)-$(REAL)" in cpu-float | cpu-double | cuda-bf16 | cuda-float | emu-bf16 | emu-float) ;; \
	    *) echo "no BACKEND=$(BACKEND) REAL=$(REAL): cpu has float, double; cuda and emu have bf16, float" >&2; exit 2;; esac
	@if [ $(BACKEND) = cuda ] && ! [ -x "$(NVCC)" ]; then \
	    echo "nvcc was not found at $(NVCC) or in PATH (hint: install the CUDA toolkit 13.0, or make CUDA=its folder)" >&2; exit 2; fi
	@echo '$(CC) $(CFLAGS) $(LIBS) $(CU_$(BACKEND))' | cmp -s - $@ || echo '$(CC) $(CFLAGS) $(LIBS) $(CU_$(BACKEND))' >$@

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,cc,$<)$(CC) $(CFLAGS) -c $< -o $@

$(BUILD)/obj/%.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,cu,$<)$(CU_$(BACKEND)) -c $< -o $@

$(BUILD)/obj/%.o: %.cc $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,cxx,$<)$(CU_emu) -c $< -o $@

$(BUILD)/obj/train/log.o: CFLAGS += -DGIT='"$(GIT)"' # what the header of a log says

$(BUILD)/libmoe.a: $(objects)
	@rm -f $@
	$(call say,ar,$@)ar rcs $@ $^

define program
$(BUILD)/$(notdir $(1)): $(BUILD)/obj/$(1).o $(BUILD)/libmoe.a
	$$(call say,ld,$$@)$$(CC) $$(CFLAGS) $$(filter %.o %.a,$$^) -o $$@ $$(LIBS)
endef
$(foreach p,$(programs),$(eval $(call program,$(p))))

$(BUILD)/libtest.a: $(oracles)
	@rm -f $@
	$(call say,ar,$@)ar rcs $@ $^

$(BUILD)/test_%: $(BUILD)/obj/tests/test_%.o $(skip) $(BUILD)/libtest.a $(BUILD)/libmoe.a
	$(call say,ld,$@)$(CC) $(CFLAGS) $(filter %.o %.a,$^) -o $@ -lcmocka $(LIBS)
$(BUILD)/test_cuda_%: $(BUILD)/obj/tests/cuda/test_cuda_%.o $(skip) $(BUILD)/libtest.a $(BUILD)/libmoe.a
	$(call say,ld,$@)$(CC) $(CFLAGS) $(filter %.o %.a,$^) -o $@ -lcmocka $(LIBS)
$(BUILD)/test_emu_%: $(BUILD)/obj/tests/emu/test_emu_%.o $(BUILD)/libtest.a $(BUILD)/libmoe.a
	$(call say,ld,$@)$(CC) $(CFLAGS) $(filter %.o %.a,$^) -o $@ -lcmocka $(LIBS)
tests: $(tests) all

# ---- use --------------------------------------------------------------------------------------------------------------
demo: deps
	@$(MAKE) --no-print-directory -j2 all
	@scripts/demo.sh
test: deps
	@scripts/deps.sh testbed count || echo "the tests that need it will be skipped"
	@tests/run.sh
test-emu: deps
	@tests/run.sh --emu
asan: deps
	@tests/run.sh --asan
bench:
	@$(MAKE) --no-print-directory -j2 all
	@$(BUILD)/bench
	@echo
	@scripts/bench_steps --no-torch --rounds 1 --train $(BUILD)/train --bench $(BUILD)/bench --json $(BUILD)/bench_steps.json \
	    --only gpt2-T64,gpt2-T256,tiny,fine,small,tiny-1x1,tiny-2x1,tiny-4x1
	@echo "all figures: $(BUILD)/bench_steps.json"
clean:
	rm -rf build build-*

.PHONY: all help deps info tests demo test test-emu asan bench clean force
.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
