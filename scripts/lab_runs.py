"""Runs of build/train as scripts/ablate and scripts/policies see them: starting one, its log, its routing trace, statistics of pairs."""
import contextlib, json, math, os, signal, statistics, struct, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.environ.get("MOE_BUILD", "build")
POLICIES = "none uniform eplb fastermoe llep echo lplb ultraep moonep topoep".split()


class Fault(Exception):
    """What was found, what was expected, what to do: ends the program with status 2"""


def main_of(name, main):
    """Runs main(); a Fault is one line and status 2, a file or program that the system refuses status 3, a reader that has
    left 141, Ctrl-C or SIGTERM 130"""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Fault as fault:
        print(f"{name}: {fault}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        print(f"{name}: {e.filename or 'output'}: {e.strerror or e} (hint: is it there, and may it be written?)", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


# ---- starting a run ---------------------------------------------------------------------------------------------------
def launcher(ranks, testbed=None):
    """testbed: None, or options of scripts/testbed run"""
    if testbed is not None:
        return [os.path.join(ROOT, "scripts/testbed"), "run", *testbed, "--"]
    return ["mpirun", "--oversubscribe", "-n", str(ranks)] if ranks > 1 else []


def run(command, log):
    """Runs it with its output in the file `log`; the exit status. Stops it, and waits, when this program is stopped."""
    env = {"OMP_WAIT_POLICY": "passive", **os.environ}
    if os.getuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    with open(log, "w") as out:
        p = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return p.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # wait() may have met its end after the signal
                os.killpg(p.pid, signal.SIGTERM)
            p.wait()
            raise


def program(name):
    path = os.path.join(ROOT, BUILD, name)
    if not os.access(path, os.X_OK):
        raise Fault(f"{path} is not there (hint: make)")
    return path


def tail(path, lines=15):
    with open(path, errors="replace") as f:
        return "".join(f.readlines()[-lines:]).rstrip()


# ---- its log ----------------------------------------------------------------------------------------------------------
def read_log(folder):
    """The header and the steps of FOLDER/log.jsonl"""
    path = os.path.join(folder, "log.jsonl")
    header, steps = None, []
    with open(path) as f:
        for n, line in enumerate(f, 1):
            try:
                row = json.loads(line)
            except ValueError:
                raise Fault(f"{path}:{n} is not JSON (hint: a run that was killed; remove its folder)")
            header = row.get("header", header)
            if "step" in row:
                steps.append(row)
    if not header or not steps:
        raise Fault(f"{path} has no header or no steps")
    return header, steps


def kept(steps):
    """The steps whose times count: without the first two, which fault memory in"""
    return steps[2:] if len(steps) > 2 else steps[-1:]


def percentile(values, p):
    v = sorted(values)
    return v[min(len(v) - 1, math.ceil(p / 100 * len(v)) - 1)]


def figures(header, steps):
    """One run in numbers: the columns of a table. None = not known."""
    def mean(key, rows=steps):
        v = [x[key] for x in rows if x[key] is not None]
        return statistics.fmean(v) if v else None

    times, last = kept(steps), steps[-1]
    pairs = [sum(x[k] or 0 for k in ("pairs_self", "pairs_node", "pairs_inter", "dropped")) for x in steps]
    vio = [x["maxvio"] for x in steps if x["maxvio"] is not None]
    return {
        "loss": statistics.fmean(x["loss"] for x in steps[-10:]),
        "val_loss": last["val_loss"],
        "val_bits": last["val_bits_per_byte"],
        "maxvio": statistics.fmean(vio) if vio else None,
        "maxvio_p95": percentile(vio, 95) if vio else None,
        "rank_before": mean("rank_max_mean_before"),
        "rank_after": mean("rank_max_mean_after"),
        "drop_pct": 100 * sum(x["dropped"] or 0 for x in steps) / sum(pairs) if sum(pairs) else None,
        "tok_s": statistics.median(x["tok_s"] for x in times),
        "wait_pct": 100 * sum(x["wait_ms"] for x in times) / sum(x["step_ms"] for x in times),
        "inter_mb": mean("bytes_inter") / 1e6 if last["bytes_inter"] is not None else None,
        "weight_mb": mean("weight_bytes") / 1e6 if last["weight_bytes"] is not None else None,
        "stage_ms": {k: statistics.fmean(x["stage_ms"][k] for x in times) for k in last["stage_ms"]},
    }


# ---- its routing trace (layout: topoep/trace_file.h) ------------------------------------------------------------------------
class Trace:
    """Demand matrices of FOLDER/route.bin. demand: (step, micro, group, layer) -> (the plan's hash, rows of R lists of E)"""

    NAMES = "R N G groups E K S C F shared layers micros micro_tokens elem_bytes grad_bytes crossing_pairs n_stages".split()

    def __init__(self, folder):
        path = os.path.join(folder, "route.bin")
        with open(path, "rb") as f:
            data = f.read()
        order = "<" if data[8:12] == b"\x04\x03\x02\x01" else ">"
        if data[:8] != b"MOEROUTE" or len(data) < 20 + 4 * len(self.NAMES):
            raise Fault(f"{path} is no routing trace")
        version, at = struct.unpack_from(order + "2I", data, 12)
        if version != 2:
            raise Fault(f"{path} is a trace of version {version}, expected 2")
        self.__dict__.update(zip(self.NAMES, struct.unpack_from(f"{order}{len(self.NAMES)}i", data, 20)))
        self.demand, n = {}, self.R * self.E
        while at + 8 <= len(data):
            kind, size = struct.unpack_from(order + "2I", data, at)
            if at + 8 + size > len(data):
                break  # a killed run's half record
            if kind == 1:
                step, micro, group, layer = struct.unpack_from(order + "q3i", data, at + 8)
                plan, *flat = struct.unpack_from(f"{order}Q{n}i", data, at + size - 4 * n)
                self.demand[step, micro, group, layer] = f"{plan:016x}", [flat[s * self.E:(s + 1) * self.E] for s in range(self.R)]
            at += 8 + size
        self.steps = sorted({k[0] for k in self.demand})

    def loads(self, layer, step):
        """Pairs of each expert in that step"""
        sums = [0] * self.E
        for (s, _, _, l), (_, rows) in self.demand.items():
            if s == step and l == layer:
                for row in rows:
                    sums = [a + b for a, b in zip(sums, row)]
        return sums

    def dead(self, within=100):
        """Experts with less than a tenth of the mean over the traced ones of the last `within` steps, mean over layers"""
        if not self.steps:
            return None
        recent = [s for s in self.steps if s > self.steps[-1] - within]
        count = 0
        for layer in range(self.layers):
            sums = [sum(x) for x in zip(*(self.loads(layer, s) for s in recent))]
            count += sum(x < 0.1 * sum(sums) / self.E for x in sums)
        return count / self.layers


COST_KEYS = ("name nodes ranks_per_node slots pair_compute_ps pair_inter_ps pair_intra_ps copy_inter_ps copy_intra_ps overlap_permille "
             "plan_fixed_ps").split()


def traffic(header, trace, balance):
    """Pairs that rank s sends to rank r in the last traced step, over layers and microbatches, and whether that is what ran: plans
    are made again by build/plan, since a trace holds their inputs. (R,R) and bool."""
    sums, same, step = [[0] * trace.R for _ in range(trace.R)], True, trace.steps[-1]
    asked = []  # the parts of topoep that the run left out; slicing is in its costs already
    for flag in ("target", "plan-effort", "stage1", "stage2", "locality", "portfolio"):
        if flag in header["flags"]:
            asked.append(f"--{flag}={header['flags'][flag]:d}" if isinstance(header["flags"][flag], bool) else f"--{flag}={header['flags'][flag]}")
    with tempfile.TemporaryDirectory() as work:
        conf, loads = os.path.join(work, "cost.conf"), os.path.join(work, "loads")
        with open(conf, "w") as f:
            f.writelines(f"{k} = {header['cost'][k]}\n" for k in COST_KEYS)
        for (s, _, _, _), (ran, rows) in sorted(trace.demand.items()):
            if s != step:
                continue
            with open(loads, "w") as f:
                f.write(f"ranks {trace.R} experts {trace.E}\n" + "".join(" ".join(map(str, r)) + "\n" for r in rows))
            made = subprocess.run([program("plan"), conf, loads, "--json", "--balance", "none" if balance == "uniform" else balance, *asked],
                                  capture_output=True, text=True)
            if made.returncode:
                raise Fault(f"build/plan refuses a traced demand matrix: {made.stderr.strip()}")
            plan = json.loads(made.stdout)
            same &= plan["hash"] == ran
            for source, _, rank, pairs in plan["flow"]:
                sums[source][rank] += pairs
    return sums, same


# ---- statistics ---------------------------------------------------------------------------------------------------------
# Student's t, two-sided 5 %, by degrees of freedom (any textbook's table)
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 12: 2.179,
           13: 2.160, 14: 2.145, 15: 2.131, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980}


def critical_t(freedom):
    """Of the largest tabled number of degrees of freedom that is not above: never too small"""
    return T_TABLE[max(d for d in T_TABLE if d <= freedom)]


def mean_sd(values):
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(a, b):
    """Differences a[i] - b[i] of runs that differ in nothing but what is compared: mean, standard deviation, and whether the mean is
    significantly not 0 by the paired t test at 5 %, two-sided: |mean| > t sd / sqrt(n). None: a single pair says nothing about that."""
    d = [x - y for x, y in zip(a, b)]
    mean, sd = mean_sd(d)
    return mean, sd, None if sd is None else abs(mean) > critical_t(len(d) - 1) * sd / math.sqrt(len(d))


def verdict(significant):
    return "one run" if significant is None else "*" if significant else "not significant"


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
