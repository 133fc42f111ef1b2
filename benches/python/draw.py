"""Lines over logarithmic axes, as SVG."""

import html
import math

# Told apart without seeing red or green, and by their dashes and marks.
STYLES = [("#0072b2", ""), ("#d55e00", "8 3"), ("#009e73", "3 3"), ("#cc79a7", "8 3 2 3"), ("#56b4e9", "12 4")]
LIMIT = ("#000000", "2 3")
WIDTH, HEIGHT = 560, 520
LEFT, TOP, RIGHT, BOTTOM = 80, 50, 530, 340
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'


class Axis:
    """A logarithmic axis from `start` to `end` pixels over whole decades."""

    def __init__(self, values, start, end):
        self.first, self.last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self.last = max(self.last, self.first + 1)
        self.start, self.end = start, end

    def at(self, value):
        return self.start + (math.log10(value) - self.first) / (self.last - self.first) * (self.end - self.start)

    def decades(self):
        return [10.0**i for i in range(self.first, self.last + 1)]

    def steps(self):
        """Lines between the decades."""
        return [k * decade for decade in self.decades()[:-1] for k in range(2, 10)]


def _text(x, y, text, size=13, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {more}>{html.escape(text)}</text>'


def _line(x1, y1, x2, y2, colour, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def _mark(i, x, y, colour):
    match i % 3:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
        case 1:
            return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>'
        case _:
            return f'<path d="M {x:.1f} {y - 5:.1f} l 5 9 h -10 z" fill="{colour}"/>'


def tick(value):
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def panel(title, x_label, y_label, lines, limit):
    """`lines`: name to points; `limit`: the name and the points of what no line can pass."""
    xs, ys = zip(*(point for points in [*lines.values(), limit[1]] for point in points))
    x, y = Axis(xs, LEFT, RIGHT), Axis(ys, BOTTOM, TOP)
    out = [_text((LEFT + RIGHT) / 2, 28, title, 16, more='font-weight="bold"')]
    for axis, minor in ((x, False), (y, False), (x, True), (y, True)):
        for value in axis.steps() if minor else axis.decades():
            at, colour = axis.at(value), "#eeeeee" if minor else "#bbbbbb"
            ends = (at, TOP, at, BOTTOM) if axis is x else (LEFT, at, RIGHT, at)
            out.insert(0, _line(*ends, colour))
    out += [_text(x.at(v), BOTTOM + 20, tick(v)) for v in x.decades()]
    out += [_text(LEFT - 8, y.at(v) + 4, tick(v), anchor="end") for v in y.decades()]
    out.append(_text((LEFT + RIGHT) / 2, BOTTOM + 44, x_label))
    middle = (TOP + BOTTOM) / 2
    out.append(_text(20, middle, y_label, more=f'transform="rotate(-90 20 {middle:.1f})"'))
    drawn = [(i, name, points, *STYLES[i % len(STYLES)], 2.5) for i, (name, points) in enumerate(lines.items())]
    drawn.append((None, f"limit: {limit[0]}", limit[1], *LIMIT, 1.5))
    for n, (i, name, points, colour, dash, width) in enumerate(drawn):
        at = [(x.at(a), y.at(b)) for a, b in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        stroke = f'stroke-width="{width}" stroke-dasharray="{dash}"'
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {stroke}/>')
        left, top = LEFT + 235 * (n % 2), BOTTOM + 76 + 24 * (n // 2)
        out.append(_line(left, top, left + 36, top, colour, stroke))
        # The limit has no marks.
        if i is not None:
            out += [_mark(i, a, b, colour) for a, b in [*at, (left + 18, top)]]
        out.append(_text(left + 44, top + 4, name, anchor="start"))
    return "\n".join(out)


def picture(panels):
    """Panels side by side."""
    width = WIDTH * len(panels)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" {FONT}>']
    out.append(f'<rect width="{width}" height="{HEIGHT}" fill="white"/>')
    for i, one in enumerate(panels):
        out.append(f'<g transform="translate({i * WIDTH} 0)">\n{one}\n</g>')
    return "\n".join([*out, "</svg>", ""])
