"""What scripts/ablate tells: table (markdown, CSV), plots, one HTML page with everything in it."""
import csv, html as markup, io, os, statistics
import lab_runs as lab
import lab_svg


class Row:
    """One line of the table: the runs of one balancer and configuration, by seed"""

    def __init__(self, config, balance, runs):
        self.config, self.balance = config, balance
        self.runs = sorted(runs, key=lambda r: r.seed)

    def values(self, key):
        v = [r.figures[key] for r in self.runs]
        return None if None in v else v


def group(runs, cells):
    """Rows in the grid's order, each with `base`, what it is compared with: the first balancer of its configuration, or, where there
    is one balancer, the first configuration"""
    rows = [Row(c, b, [r for r in runs if r.config == c and r.balance == b]) for c, b in cells]
    one = len({r.balance for r in rows}) == 1
    for r in rows:
        r.base = rows[0] if one else next(x for x in rows if x.config == r.config)
        parts = [] if one and r.config else [r.balance]
        r.label = " ".join(parts + [f"{k} {v}" for k, v in r.config.items()]) + (" †" if r.balance == "uniform" else "")
    names, configs = list(dict.fromkeys(r.balance for r in rows)), list(dict.fromkeys(str(r.config) for r in rows))
    for r in rows:
        i, j = names.index(r.balance), configs.index(str(r.config))
        r.colour, r.dash = (lab_svg.COLOURS[j % 10], "") if one else (lab_svg.COLOURS[i % 10], lab_svg.DASHES[j % 4])
    return rows


# ---- the table ----------------------------------------------------------------------------------------------------------
def loss_key(rows):
    """What the runs' quality is told in: key, name, decimals"""
    if all(r.values("val_bits") for r in rows):
        return "val_bits", "val bits/byte"
    return ("val_loss", "val loss") if all(r.values("val_loss") for r in rows) else ("loss", "train loss")


def spread(values, form):
    if values is None:
        return "n/a"
    mean, sd = lab.mean_sd(values)
    return format(mean, form) + (f" ± {format(sd, form)}" if sd is not None else "")


def difference(row, key, form, relative=False):
    """Against the base, pair by pair"""
    a, b = row.values(key), row.base.values(key)
    if row is row.base:
        return "-"
    if a is None or b is None:
        return "n/a"
    if relative:
        a, b = [100 * (x / y - 1) for x, y in zip(a, b)], [0] * len(a)
    mean, _, significant = lab.paired(a, b)
    sign = {None: "", True: " *", False: " (n.s.)"}[significant]
    return format(mean, "+" + form) + (" %" if relative else "") + sign


def cells(rows):
    key, name = loss_key(rows)
    head = ["balancer", name, "difference", "maxvio mean / p95", "ranks before > after", "dead", "drop %", "tok/s", "difference ", "wait %",
            "MB/step between nodes", "MB/step weights"]
    body = []
    for r in rows:
        two = lambda a, b, mid: "n/a" if None in (r.values(a), r.values(b)) else f"{statistics.fmean(r.values(a)):.2f}{mid}{statistics.fmean(r.values(b)):.2f}"
        body.append([r.label, spread(r.values(key), ".4f"), difference(r, key, ".5f"), two("maxvio", "maxvio_p95", " / "), two("rank_before", "rank_after", " > "),
                     spread(r.values("dead"), ".1f"), spread(r.values("drop_pct"), ".1f"), spread(r.values("tok_s"), ".0f"),
                     difference(r, "tok_s", ".1f", relative=True), spread(r.values("wait_pct"), ".1f"), spread(r.values("inter_mb"), ".1f"),
                     spread(r.values("weight_mb"), ".1f")])
    return head, body


def fastest(rows):
    """A sentence for each configuration: who was fastest, and whether the next one really is slower"""
    out = []
    for base in dict.fromkeys(r.base for r in rows):
        mine = [r for r in rows if r.base is base and r.balance != "uniform"]
        if len(mine) < 2:
            continue
        first, second = sorted(mine, key=lambda r: -statistics.fmean(r.values("tok_s")))[:2]
        _, _, significant = lab.paired(first.values("tok_s"), second.values("tok_s"))
        gain = statistics.fmean(x / y for x, y in zip(first.values("tok_s"), base.values("tok_s")))
        said = {None: "one seed cannot say whether that is significant", True: "a significant difference", False: "the difference is not significant"}[significant]
        than = "" if first is base else f", {gain:.3f} x {base.label}"
        out.append(f"Fastest: {first.label}{than}; next is {second.label}: {said}.")
    return out


def notes(rows, grid):
    n = len(grid.seeds)
    base = "the first balancer of the same configuration" if len(grid.balancers) > 1 else "the first row"
    out = [f"Mean ± standard deviation over {n} seed{'s' if n > 1 else ''}. Differences: mean of the paired differences to {base}, the same seed on both sides."]
    if n > 1:
        t = lab.critical_t(n - 1)
        out.append(f"* significant, n.s. not significant: paired t test, two-sided, 5 %, |mean| > t sd / sqrt(n), t = {t:.3f} for {n} pairs.")
    else:
        out.append("One seed says nothing about significance.")
    out.append("tok/s: median over a run's steps after the second. maxvio: the most loaded expert over the mean, minus 1. ranks: pairs on the fullest rank "
               "over the mean, with every expert at home and as computed. dead: experts with less than a tenth of the mean over the last 100 steps, "
               "as traced, mean over layers. MB between nodes: activations and routing weights, forward and backward; weights: copies out and gradients back.")
    if any(r.balance == "uniform" for r in rows):
        out.append("† uniform replaces the router's choice by an even one: no training method but a ceiling of speed; its loss is no result.")
    return out


def table(rows, grid):
    head, body = cells(rows)
    lines = ["| " + " | ".join(h.strip() for h in head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(b) + " |" for b in body]
    said = fastest(rows)
    markdown = "\n".join(lines) + "\n\n" + "\n\n".join(said + notes(rows, grid)) + "\n"
    out = io.StringIO()
    keys = ["val_bits", "val_loss", "loss", "maxvio", "maxvio_p95", "rank_before", "rank_after", "dead", "drop_pct", "tok_s", "wait_pct", "inter_mb", "weight_mb"]
    axes = list(rows[0].config)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["balance", *axes, "seed", *keys]) # a line per run: what every other figure is made of
    for r in rows:
        for run in r.runs:
            writer.writerow([r.balance, *r.config.values(), run.seed, *("" if run.figures[k] is None else repr(run.figures[k]) for k in keys)])
    return {"markdown": markdown, "csv": out.getvalue(), "head": head, "body": body, "said": said, "notes": notes(rows, grid)}


# ---- plots --------------------------------------------------------------------------------------------------------------
def curve(row, key, points=60):
    """Steps in `points` bins at most: bin's last step, mean over seeds of the bin's mean, least and most"""
    each = [[(s["step"], s[key]) for s in r.steps if s[key] is not None] for r in row.runs]
    n = min(map(len, each))
    width = max(1, n // points)
    xs, middle, low, high = [], [], [], []
    for a in range(0, n - width + 1, width):
        bins = [statistics.fmean(v for _, v in e[a:a + width]) for e in each]
        xs.append(each[0][a + width - 1][0])
        middle.append(statistics.fmean(bins))
        low.append(min(bins))
        high.append(max(bins))
    return xs, middle, low, high


def lines(rows, title, label, key):
    series = [(r.label, r.colour, r.dash, *curve(r, key)) for r in rows]
    return lab_svg.curves(title, label, [s for s in series if s[3]])


def plots(rows, grid):
    stage = [(r.label, {k: statistics.fmean(x.figures["stage_ms"][k] for x in r.runs) for k in r.runs[0].figures["stage_ms"]}) for r in rows]
    seeds = "mean over seeds, band from least to most" if len(grid.seeds) > 1 else "one seed"
    out = [("loss.svg", lines(rows, f"Training loss ({seeds})", "nats per token", "loss"))]
    if all(r.values("maxvio") for r in rows):
        out.append(("maxvio.svg", lines(rows, f"MaxVio ({seeds})", "most loaded expert over the mean, minus 1", "maxvio")))
    return out + [("time.svg", lab_svg.stacks("Time of a step by stage (mean over ranks, steps, seeds)", "ms", stage))]


def heat_section(rows):
    """One block per different routing: exact balancers do not change what routers choose"""
    shown = []
    for row in rows:
        run = row.runs[0]
        if not run.trace or not run.trace.steps:
            continue
        t = run.trace
        loads = [[t.loads(layer, s) for s in t.steps] for layer in range(t.layers)]
        alike = next((b for b in shown if nearly(b[1], loads)), None)
        if alike:
            alike[0].append(row.label)
        else:
            shown.append(([row.label], loads, t))
    out = ""
    for labels, loads, t in shown:
        maps = [lab_svg.heat(f"layer {i} of the MoE layers", t.steps, [[x * t.E / (sum(c) or 1) for x in c] for c in layer]) for i, layer in enumerate(loads)]
        out += f"<h3>{markup.escape(', '.join(labels))}</h3><div class=grid>{''.join(maps)}</div>"
    return out and "<h2>Load of each expert over the steps</h2><p>Pairs over the mean, first seed. Balancers whose routers chose the same to 2 % share a block.</p>" \
        + out + lab_svg.heat_scale()


def nearly(a, b):
    pairs = [(x, y) for la, lb in zip(a, b) for ca, cb in zip(la, lb) for x, y in zip(ca, cb)]
    return len(a) == len(b) and sum(abs(x - y) for x, y in pairs) <= 0.02 * sum(x for x, _ in pairs)


def traffic_section(rows):
    maps, differ = "", False
    for row in rows:
        run = row.runs[0]
        if run.trace and run.trace.steps and run.trace.R > 1:
            values, same = lab.traffic(run.header, run.trace, row.balance)
            differ |= not same
            maps += lab_svg.matrix(row.label + ("" if same else " ‡"), values, run.trace.G)
    note = "" if not differ else " ‡ planned anew without the run's own past: the run's plans may have been others."
    return maps and ("<h2>Traffic between ranks</h2><p>Per cent of the pairs of the last traced step, all layers, first seed: on their own rank (blue), on another "
                     f"rank of the node (green), on another node (orange).{note}</p><div class=grid>{maps}</div>")


CSS = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;color:#23303d;background:#f4f5f7;margin:0}
main{max-width:1160px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 6px}h3{font-size:14px;margin:14px 0 4px;color:#4a5866}
p{margin:4px 0 10px;color:#4a5866;max-width:900px}code{background:#e9ecef;border-radius:4px;padding:2px 6px;font-size:13px;word-break:break-all}
.card{background:#fff;border:1px solid #e4e7eb;border-radius:10px;padding:14px 18px;margin:12px 0;overflow-x:auto}
.said{font-size:16px;color:#23303d;border-left:4px solid #3d9a5f}
table{border-collapse:collapse;font-size:12.5px;white-space:nowrap;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:right;color:#4a5866;border-bottom:2px solid #cfd5db;padding:6px 7px;white-space:normal;vertical-align:bottom}
td{text-align:right;border-bottom:1px solid #eceef1;padding:6px 7px}th:first-child,td:first-child{text-align:left}td:first-child{font-weight:600;white-space:normal}
.grid{display:flex;flex-wrap:wrap;gap:14px;align-items:flex-start}.grid .card{margin:0}svg{max-width:100%;height:auto}.small{font-size:13px}
"""


def html(rows, grid, made, command):
    h = rows[0].runs[0].header
    e = markup.escape
    facts = (f"{h['ranks']} rank{'s' if h['ranks'] > 1 else ''} on {h['nodes']} node{'s' if h['nodes'] > 1 else ''}, {h['transport']}; {h['device']}; "
             f"{h['params'] / 1e6:.2f} M parameters, {h['active_params'] / 1e6:.2f} M per token; {h['flags']['batch']} sequences of {h['flags']['seq']} a step, "
             f"{len(rows[0].runs[0].steps)} steps; moe.c {h['version']}, {h['started'][:10]}")
    head = "".join(f"<th>{e(x.strip())}</th>" for x in made["head"])
    body = "".join("<tr>" + "".join(f"<td>{e(x)}</td>" for x in line) + "</tr>" for line in made["body"])
    said = "".join(f"<div>{e(s)}</div>" for s in made["said"])
    figures = "".join(f"<div class=card>{svg}</div>" for _, svg in plots(rows, grid))
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>moe.c: {e(os.path.basename(grid.out))}</title>"
            f"<style>{CSS}</style><main><h1>{e(', '.join(grid.balancers))}</h1><p>{e(facts)}<br><code>{e(command)}</code></p>"
            + (f"<div class='card said'>{said}</div>" if said else "")
            + f"<div class=card><table><tr>{head}</tr>{body}</table></div><div class=small>{''.join(f'<p>{e(n)}</p>' for n in made['notes'])}</div>"
            f"<h2>Over the steps, and where the time goes</h2><p>Curves that lie on each other are the rule: exact balancers change no training.</p>"
            f"<div class=grid>{figures}</div>{heat_section(rows)}{traffic_section(rows)}</main></html>\n")
