# moe.c: `make demo` trains, `make test` proves, `make help` lists the rest.

BUILD ?= build
CC    ?= gcc
ifeq ($(origin CC),default)
CC     = gcc
endif
MPI   ?= 1
REAL  ?= float
OPT   ?= -O3 -g
SAN   ?=

WARN     = -Wall -Wextra -Werror -Wshadow -Wvla
# The -fno- pair changes no result (nobody here reads errno after sqrt, or the FP exception flags); without it no loop with a
# square root, an exp or a select is vectorised: kernels/cpu is up to six times slower.
BASE     = -std=c11 -D_GNU_SOURCE $(WARN) $(OPT) -fopenmp -ffp-contract=fast -fno-math-errno -fno-trapping-math $(SAN)
CFLAGS   = $(BASE) -I. -MMD -MP $(if $(filter double,$(REAL)),-DREAL_DOUBLE) $(if $(filter 1,$(MPI)),-DUSE_MPI $(MPI_CFLAGS))
LIBS     = -ljansson $(if $(filter 1,$(MPI)),$(MPI_LIBS)) -lm -lpthread
GIT     := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

# One short line per file; V=1 shows the commands.
say = $(if $(V),,@echo '$(1)  $(2)';)

programs = $(basename $(wildcard train/train.c train/generate.c data/prepare.c topoep/plan.c topoep/replay.c topoep/calibrate.c kernels/bench.c))
sources  = $(filter-out $(programs:%=%.c),$(wildcard kernels/*.c kernels/cpu/*.c topoep/*.c moe/*.c model/*.c data/*.c train/*.c))
objects  = $(sources:%.c=$(BUILD)/obj/%.o)
tests    = $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/test_*.c))
oracles  = $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/ref/*.c tests/common/*.c))

all: $(addprefix $(BUILD)/,$(notdir $(programs)))

help:
	@echo "make            build/train, build/generate, build/prepare, build/plan, build/replay (CPU)"
	@echo "make demo       set up, build, train on four ranks for about 3 minutes, sample"
	@echo "make test       set up, build, run every test"
	@echo "make asan       the same tests under the address and undefined-behaviour sanitizers"
	@echo "make bench      the ops against this machine's own ceilings"
	@echo "make info       what was probed, how, and what was found"
	@echo "make clean      removes build folders"
	@echo "Variables: MPI=0 (one process, no Open MPI)  REAL=double  BUILD=folder  CC=compiler  OPT=flags  V=1"

# ---- set-up -----------------------------------------------------------------------------------------------------------
PROBE = $(BUILD)/probe-$(notdir $(firstword $(CC)))-$(MPI).mk
$(PROBE): scripts/probe.sh
	@mkdir -p $(@D)
	@scripts/probe.sh $@ "$(CC)" "$(BASE)" $(MPI)
ifeq ($(filter clean help deps asan test demo,$(MAKECMDGOALS)),)
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
	@echo '$(CC) $(CFLAGS) $(LIBS)' | cmp -s - $@ || echo '$(CC) $(CFLAGS) $(LIBS)' >$@

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,cc,$<)$(CC) $(CFLAGS) -c $< -o $@

$(BUILD)/obj/train/log.o: CFLAGS += -DGIT='"$(GIT)"' # what the header of a log says

$(BUILD)/libmoe.a: $(objects)
	@rm -f $@
	$(call say,ar,$@)ar rcs $@ $^

define program
$(BUILD)/$(notdir $(1)): $(BUILD)/obj/$(1).o $(BUILD)/libmoe.a
	$$(call say,ld,$$@)$$(CC) $$(CFLAGS) $$(filter %.o %.a,$$^) -o $$@ $$(LIBS)
endef
$(foreach p,$(programs),$(eval $(call program,$(p))))

$(BUILD)/test_%: $(BUILD)/obj/tests/test_%.o $(oracles) $(BUILD)/libmoe.a
	$(call say,ld,$@)$(CC) $(CFLAGS) $(filter %.o %.a,$^) -o $@ -lcmocka $(LIBS)
tests: $(tests) all

# ---- use --------------------------------------------------------------------------------------------------------------
demo: deps
	@$(MAKE) --no-print-directory -j2 all
	@scripts/demo.sh
test: deps
	@scripts/deps.sh testbed || echo "the tests that need it will be skipped"
	@tests/run.sh
asan: deps
	@tests/run.sh --asan
bench:
	@$(MAKE) --no-print-directory -j2 $(BUILD)/bench
	@$(BUILD)/bench
clean:
	rm -rf build build-*

.PHONY: all help deps info tests demo test asan bench clean force
.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
