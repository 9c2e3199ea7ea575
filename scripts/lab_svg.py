"""Plots as SVG text, drawn by hand: curves with bands, stacked bars, heat maps, matrices. Nothing to install."""
import base64, math, struct, zlib
from xml.sax.saxutils import escape

COLOURS = ["#3b6fb6", "#d9622b", "#3d9a5f", "#8d5fb3", "#c23b4e", "#2b9fa8", "#b08a1e", "#d06aa0", "#6b7785", "#7a5b3a"]
STAGE_COLOURS = {"experts": "#3d9a5f", "attention": "#3b6fb6", "router": "#8d5fb3", "counts": "#e78a97", "plan": "#c23b4e", "copies": "#d9622b", "dispatch": "#e0a93b",
                 "combine": "#f0cf7a", "reduce": "#2b9fa8", "optimizer": "#7fc4c9", "head": "#7fa3d4", "embed": "#b5c9e6", "other": "#b9c0c8",
                 "wait": "#e4e7eb"}
DASHES = ["", "6 3", "2 3", "8 3 2 3"]
INK, FAINT, GRID = "#23303d", "#6b7785", "#e4e7eb"


def svg(width, height, body):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif" font-size="12" fill="{INK}">\n{body}</svg>\n')


def text(x, y, words, anchor="start", **style):
    more = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(str(words))}</text>\n'


def ticks(low, high, about=5):
    """Round numbers from low to high"""
    step = 10 ** math.floor(math.log10((high - low) / about))
    step = next(s * step for s in (1, 2, 5, 10) if (high - low) / (s * step) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def number(v):
    if v == 0 or 0.01 <= abs(v) < 1e4:
        return f"{v:.4g}"
    return f"{v / 1000:.4g}k" if 1e4 <= abs(v) < 1e6 else f"{v:.2e}"


def curves(title, y_label, series, width=512, height=330):
    """series: (label, colour, dash, xs, middle, low, high); low to high is the band. Lines that lie on each other show as edges."""
    per_line = max(1, (width - 62) // (40 + 7 * max(len(s[0]) for s in series)))
    left, right, top, bottom = 62, 12, 40 + 18 * ((len(series) + per_line - 1) // per_line), 44
    xs = [x for s in series for x in s[3]]
    ys = sorted(y for s in series for k in (5, 6) for y in s[k])
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    y0, y1 = ys[0], ys[-1]
    pad = 0.05 * (y1 - y0) or 0.5
    y0, y1 = y0 - pad if y0 < 0 or y0 > 3 * pad else 0, y1 + pad
    X = lambda x: left + (x - x0) / (x1 - x0) * (width - left - right)
    Y = lambda y: top + (y1 - y) / (y1 - y0) * (height - top - bottom)
    out = text(left, 20, title, font_weight=600, font_size=14)
    for i, (label, colour, dash, *_) in enumerate(series):
        x, y = left + (i % per_line) * (width - left) / per_line, 40 + 18 * (i // per_line)
        out += f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>\n'
        out += text(x + 28, y, label)
    for v in ticks(y0, y1):
        out += f'<line x1="{left}" x2="{width - right}" y1="{Y(v):.1f}" y2="{Y(v):.1f}" stroke="{GRID}"/>\n' + text(left - 8, Y(v) + 4, number(v), "end", fill=FAINT)
    for v in ticks(x0, x1, 8):
        out += text(X(v), height - bottom + 18, number(v), "middle", fill=FAINT)
    out += text((left + width - right) / 2, height - 8, "step", "middle", fill=FAINT)
    out += f'<text transform="translate(14 {(top + height - bottom) / 2:.0f}) rotate(-90)" text-anchor="middle" fill="{FAINT}">{escape(y_label)}</text>\n'
    for _, colour, _, xx, _, low, high in series:
        if low != high:
            points = " ".join(f"{X(x):.1f},{Y(y):.1f}" for x, y in [*zip(xx, high), *reversed([*zip(xx, low)])])
            out += f'<polygon points="{points}" fill="{colour}" opacity="{0.25 / len(series):.3f}"/>\n'
    for i, (label, colour, dash, xx, middle, _, _) in enumerate(series):
        points = " ".join(f"{X(x):.1f},{Y(y):.1f}" for x, y in zip(xx, middle))
        out += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{1.6 + 1.3 * (len(series) - 1 - i):.1f}" stroke-linejoin="round" stroke-dasharray="{dash}"><title>{escape(label)}</title></polyline>\n'
    return svg(width, height, out)


def stacks(title, unit, rows, width=1070):
    """rows: (label, {part: value}); parts in the order of STAGE_COLOURS, those that are nowhere seen left out"""
    parts = [p for p in STAGE_COLOURS if any(r[1].get(p, 0) > 0.002 * sum(r[1].values()) for r in rows)]
    left, right, bar, columns = 20 + 7 * max(len(r[0]) for r in rows), 70, 26, 10
    top = 40 + 18 * ((len(parts) + columns - 1) // columns)
    most = max(sum(r[1].values()) for r in rows)
    out = text(left, 20, title, font_weight=600, font_size=14)
    for i, p in enumerate(parts):
        x, y = left + (i % columns) * (width - left) / columns, 40 + 18 * (i // columns)
        out += f'<rect x="{x:.1f}" y="{y - 10}" width="11" height="11" rx="2" fill="{STAGE_COLOURS[p]}"/>\n' + text(x + 16, y, p)
    for n, (label, values) in enumerate(rows):
        y, x = top + n * (bar + 8), left
        out += text(left - 8, y + bar / 2 + 4, label, "end")
        for p in parts:
            w = values.get(p, 0) / most * (width - left - right)
            out += f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{bar}" fill="{STAGE_COLOURS[p]}"><title>{p} {values.get(p, 0):.1f} {unit}</title></rect>\n'
            if w > 34 and p != "wait":
                out += text(x + w / 2, y + bar / 2 + 4, f"{values[p]:.0f}", "middle", fill="#fff" if p not in ("combine", "optimizer", "embed", "other") else INK, font_size=11)
            x += w
        out += text(x + 6, y + bar / 2 + 4, f"{sum(values.values()):.0f} {unit}")
    return svg(width, top + len(rows) * (bar + 8) + 6, out)


# ---- heat -------------------------------------------------------------------------------------------------------------
# from dark blue (0) through white (1, the mean) to dark red
HEAT = [(0, (33, 70, 128)), (0.5, (132, 170, 210)), (1, (247, 247, 245)), (1.6, (240, 170, 120)), (2.5, (200, 70, 50)), (4, (110, 15, 35))]


def heat_colour(v):
    v = max(HEAT[0][0], min(HEAT[-1][0], v))
    for (a, low), (b, high) in zip(HEAT, HEAT[1:]):
        if v <= b:
            return tuple(round(p + (q - p) * (v - a) / (b - a)) for p, q in zip(low, high))


def png(rows):
    """rows of (r, g, b) as a data address"""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    raw = b"".join(b"\0" + bytes(c for pixel in row for c in pixel) for row in rows)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", len(rows[0]), len(rows), 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def heat(title, steps, loads, width=345):
    """loads[step][expert] over their mean; experts downwards, steps to the right"""
    E, left, top = len(loads[0]), 30, 26
    height = max(60, min(200, 14 * E))
    rows = [[heat_colour(column[e]) for column in loads] for e in range(E)]
    out = text(left, 15, title, font_weight=600)
    out += (f'<image x="{left}" y="{top}" width="{width - left - 6}" height="{height}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="{png(rows)}"/>\n')
    out += f'<rect x="{left}" y="{top}" width="{width - left - 6}" height="{height}" fill="none" stroke="{GRID}"/>\n'
    for e in sorted({0, E - 1}):
        out += text(left - 5, top + (e + 0.5) * height / E + 4, f"{e}", "end", fill=FAINT, font_size=10)
    out += text(left, top + height + 13, f"step {steps[0]}", fill=FAINT, font_size=10) + text(width - 6, top + height + 13, steps[-1], "end", fill=FAINT, font_size=10)
    return svg(width, top + height + 18, out)


def heat_scale(width=345):
    left, n = 30, 80
    values = [4 * i / (n - 1) for i in range(n)]
    out = f'<image x="{left}" y="6" width="{width - left - 6}" height="10" preserveAspectRatio="none" href="{png([[heat_colour(v) for v in values]])}"/>\n'
    for v in range(5):
        out += text(left + v / 4 * (width - left - 6), 30, f"{v}" + (" x mean" if v == 1 else ""), "middle", fill=FAINT, font_size=10)
    return svg(width, 34, out)


def matrix(title, values, per_node, size=230):
    """values[source][rank] as shares of all, in per cent; nodes are framed"""
    R, left, top = len(values), 26, 44
    cell = (size - left - 6) / R
    total, most = sum(map(sum, values)) or 1, max(map(max, values)) or 1
    out = text(left, 15, title, font_weight=600) + text(left, 29, "from rank (down) to rank (across)", fill=FAINT, font_size=10)
    for s, row in enumerate(values):
        out += text(left - 6, top + (s + 0.5) * cell + 4, s, "end", fill=FAINT, font_size=10) if R <= 16 else ""
        for r, v in enumerate(row):
            base = (59, 111, 182) if s == r else (61, 154, 95) if s // per_node == r // per_node else (217, 98, 43)
            share = v / most
            colour = "#%02x%02x%02x" % tuple(round(255 + (c - 255) * share) for c in base)
            out += f'<rect x="{left + r * cell:.1f}" y="{top + s * cell:.1f}" width="{cell:.1f}" height="{cell:.1f}" fill="{colour}"><title>{s} to {r}: {v} pairs</title></rect>\n'
            if R <= 8:
                out += text(left + (r + 0.5) * cell, top + (s + 0.5) * cell + 4, f"{100 * v / total:.1f}", "middle", font_size=10, fill="#fff" if share > 0.6 else INK)
    for a in range(0, R, per_node):
        for b in range(0, R, per_node):
            out += (f'<rect x="{left + a * cell:.1f}" y="{top + b * cell:.1f}" width="{cell * per_node:.1f}" height="{cell * per_node:.1f}" '
                    f'fill="none" stroke="{FAINT}" stroke-width="1.2"/>\n')
    return svg(size, size + top - left + 12, out)
