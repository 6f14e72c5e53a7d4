"use strict";
// Script of a report: figures that zoom, tables that sort, the dark theme. Without it the page shows the same content.
(() => {
  const paths = typeof uPlot === "undefined" ? null : uPlot.paths;  // a page without curves has no uPlot
  const LINES = paths && {line: paths.linear(), stepped: paths.stepped({align: 1})};
  const INK = "#374151", GRID = "#e5e7eb", FONT = "12px system-ui, sans-serif";
  const STROKED = {ring: 1.5, X: 2.5};  // markers that are drawn as lines, with their width
  const DASHES = {"--": [7, 4], ":": [2, 3], "-.": [8, 3, 2, 3]};
  const GLYPHS = {v: "▼", "^": "▲", X: "✖", s: "■", D: "◆", o: "●", ring: "○"};
  const OUTLINES = {
    v: [[-1, -.9], [1, -.9], [0, 1]], "^": [[-1, .9], [1, .9], [0, -1]],
    X: [[-.7, -.7], [.7, .7], [0, 0], [.7, -.7], [-.7, .7], [0, 0]],
    s: [[-.8, -.8], [.8, -.8], [.8, .8], [-.8, .8]], D: [[0, -1], [1, 0], [0, 1], [-1, 0]],
  };

  function make(tag, properties, ...inside) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...inside);
    return made;
  }

  const button = (text, title, act) => make("button", {type: "button", title, onclick: act}, text);

  function save(name, blob) {
    const link = make("a", {href: URL.createObjectURL(blob), download: name});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function words(value, base) {
    const power = Math.log2(value);
    if (base === 2 && power >= 10 && Number.isInteger(power)) return `2^${power}`;
    const size = Math.abs(value);
    if (size >= 1e9 || (size && size < 1e-4)) return (+value.toPrecision(5)).toExponential().replaceAll("-", "−");
    return (+value.toPrecision(6)).toLocaleString("en-US", {maximumFractionDigits: 10}).replace("-", "−");
  }

  function tick(value, base) {
    if (base === 2 && value >= 1) return "2" + [...String(Math.log2(value))].map(digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] ?? digit).join("");
    for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (Math.abs(value) >= size) return words(value / (letter === "k" ? 1e3 : size)) + letter;
    return words(value).replaceAll(",", "");
  }

  // A column of values for each curve, and two more for the ends of a band. The legend has a row for the first column
  // of each name; the others, such as the runs of other seeds, are shown and hidden with it.
  function columns(chart) {
    const found = chart.series.flatMap(series => [
      {...series, values: series.y},
      ...(series.low.length ? ["low", "high"].map(end => ({...series, values: series[end], end})) : []),
    ]);
    for (const one of found)
      one.lead = found.findIndex(other => other.name === one.name && other.colour === one.colour);
    return found;
  }

  const joined = (shown, steps) => uPlot.join([[steps], ...shown.map(one => [one.x, one.values])]);

  function painted(marker, size) {
    return (plot, at, first, last) => {
      const path = new Path2D(), radius = size / 2 * devicePixelRatio, values = plot.data[at];
      for (let i = first; i <= last; i++) {
        if (values[i] == null) continue;
        const x = plot.valToPos(plot.data[0][i], "x", true), y = plot.valToPos(values[i], plot.series[at].scale, true);
        for (const [j, [right, down]] of (OUTLINES[marker] ?? []).entries())
          path[j ? "lineTo" : "moveTo"](x + right * radius, y + down * radius);
        if (!OUTLINES[marker]) { path.moveTo(x + radius, y); path.arc(x, y, radius, 0, 2 * Math.PI); }
        path.closePath();
      }
      return {stroke: path, fill: marker in STROKED ? null : path, flags: 0};
    };
  }

  function legendLabel(series) {
    const marks = !(series.kind in LINES);
    const sign = make("span", {className: "sign"}, marks ? GLYPHS[series.marker] ?? "■" : "");
    sign.style.color = series.colour;
    if (!marks) {
      const style = {"-": "solid", ":": "dotted"}[series.dash] ?? "dashed";
      sign.style.borderTop = `${series.alpha < .4 ? 1 : 3}px ${style} ${series.colour}`;
    }
    return make("span", {title: series.name}, sign, series.name);
  }

  // Text of the legend: the values at the cursor of all curves of a name, with their step where it is another.
  function valueWords(shown, lead, base) {
    return plot => {
      return [...new Set(shown.flatMap((one, column) => {
        const index = plot.cursor.idxs?.[column + 1], value = index == null ? null : plot.data[column + 1][index];
        if (one.lead !== lead || one.end || value == null) return [];
        const step = plot.data[0][index], away = step === plot.data[0][plot.cursor.idx] ? "" : `at ${words(step)}`;
        if (one.kind === "steps") return [`at ${words(step)}`];
        const ends = [2, 3].map(more => words(plot.data[column + more]?.[index] ?? 0, base));
        return [[words(value, base), one.low.length && `(${ends.join(" to ")})`, away].filter(Boolean).join(" ")];
      }))].join(", ");
    };
  }

  function curve(shown, column, base) {
    const series = shown[column], led = (series.lead !== column || series.end) && "led";
    const own = {label: "", scale: series.kind === "steps" ? "height" : "y", class: led, width: 0};
    if (series.end) return {...own, points: {show: false}, paths: LINES.line};
    const drawn = {...LINES, bars: paths.bars({size: [.92]})}[series.kind] ?? (() => null);
    const size = series.size * 1.5;
    return {
      ...own, label: legendLabel(series), value: valueWords(shown, column, base),
      stroke: series.colour, alpha: series.alpha,
      width: series.kind in LINES ? series.width : 0, dash: DASHES[series.dash], paths: drawn,
      fill: series.kind === "bars" ? series.colour : undefined,
      points: {
        show: series.marker !== "None", size, paths: painted(series.marker, size), stroke: series.colour,
        fill: series.colour, width: STROKED[series.marker] ?? 0,
      },
    };
  }

  function logSplits(base) {
    return (plot, axis, min, max) => {
      const log = value => Math.log(value) / Math.log(base);
      const first = Math.ceil(log(min) - 1e-9), last = Math.floor(log(max) + 1e-9);
      const every = Math.max(Math.ceil((last - first + 1) / 6), 1), found = [];
      for (let power = first - 1; power <= last; power++)
        for (const part of last - first < 2 && base === 10 ? [1, 2, 5] : [1]) {
          const value = base === 2 ? 2 ** power : +(part * base ** power).toPrecision(12);
          if (power % every === 0 && value >= min && value <= max) found.push(value);
        }
      if (found.length > 1 || base === 2) return found;
      return [min, Math.sqrt(min * max), max].map(value => +value.toPrecision(3));
    };
  }

  function heightRange(chart, base) {
    if (chart.rows.length) return [-.6, chart.rows.length - .4];
    if (chart.series.some(series => series.kind === "bars")) return (plot, min, max) => [0, max ? max * 1.15 : 1];
    if (!base) return (plot, min, max) => min == null ? [0, 1] : uPlot.rangeNum(min, max, {
      min: {pad: .08, soft: 0, mode: 3}, max: {pad: .08, soft: 0, mode: 3}});
    return (plot, min, max) => {
      if (min == null || !(max > 0)) return [1, base];
      const room = Math.max((max / min) ** .06, base === 2 ? 2 : 1.1);
      return [min / room, max * room];
    };
  }

  function options(chart, shown, base, place, zoomed) {
    const rule = {stroke: GRID, width: 1};
    const side = {stroke: INK, font: FONT, labelFont: FONT, labelSize: 18, grid: rule, ticks: {...rule, size: 5}};
    const across = {
      ...side, size: place.last ? 30 : 12, label: place.last ? "step" : undefined,
      values: (plot, at) => at.map(value => place.last ? tick(value) : ""),
      incrs: Array.from({length: 27}, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)),
    };
    const up = {
      ...side, size: place.wide ? 136 : 66, label: chart.unit || undefined,
      values: (plot, at) => at.map(value => tick(value, base)),
    };
    if (chart.rows.length) Object.assign(up, {
      size: up.size + side.labelSize, splits: () => chart.rows.map((_, row) => row), values: () => chart.rows,
    });
    if (base) Object.assign(up, {splits: logSplits(base), filter: (plot, at) => at});
    return {
      width: place.width, height: chart.rows.length ? 24 * chart.rows.length + 60 : place.alone ? 250 : 165,
      scales: {
        x: {time: false},
        y: {distr: base ? 3 : 1, log: base || 10, range: heightRange(chart, base), dir: chart.rows.length ? -1 : 1},
        height: {range: [0, 1]},
      },
      axes: [across, up],
      series: [{label: "step", value: (plot, step) => step == null ? "" : words(step)},
        ...shown.map((one, column) => curve(shown, column, base))],
      bands: shown.flatMap((one, at) => one.end === "high" ? [{series: [at + 1, at], fill: one.colour + "26"}] : []),
      cursor: {
        sync: {key: place.key, setSeries: false}, y: false, drag: {x: true, y: false, dist: 5},
        points: {size: (plot, at) => shown[at - 1].end ? 0 : 7},
      },
      legend: {show: !chart.rows.length, markers: {show: false}},
      hooks: {setScale: [zoomed], setSeries: [(plot, at, change) => {
        const lead = at - 1;
        if (change.show != null && shown[lead]?.lead === lead) shown.forEach((one, column) => {
          if (one.lead === lead && column !== lead) plot.setSeries(column + 1, {show: change.show});
        });
      }]},
    };
  }

  // One figure: its charts below one another, which share the cursor and the zoom.
  function answer(figure) {
    const charts = JSON.parse(figure.dataset.charts), name = figure.dataset.name;
    const shown = charts.map(columns), every = shown.flat().flatMap(one => one.x);
    const range = [0, every.reduce((most, step) => Math.max(most, step), 1)];
    const loggable = charts.map(chart => !chart.rows.length && chart.series.some(one =>
      one.kind !== "bars" && one.kind !== "steps" && one.y.some(value => value > 0)));
    let logarithmic = charts.some(chart => chart.log), plots = [];
    const room = make("div", {className: "charts"}), note = make("p", {className: "note", hidden: true});
    const log = button("log y", "logarithmic vertical axis", () => { logarithmic = !logarithmic; draw(); });
    const whole = button("whole run", "undo the zoom (or double-click)", () => zoom(...range));
    const tools = make(
      "div", {className: "tools"}, log, whole, button("PNG", "save this view as a picture", picture),
      button("CSV", "save all values", () => save(`${name}.csv`, new Blob([csv()], {type: "text/csv"}))),
    );
    const zoom = (min, max) => plots[0].setScale("x", {min, max});
    [log.hidden, whole.hidden] = [!loggable.some(Boolean), true];

    function zoomed(plot, key) {
      if (key !== "x") return;
      const {min, max} = plot.scales.x;
      whole.hidden = min <= range[0] && max >= range[1];
      figure.classList.toggle("zoomed", !whole.hidden);
      for (const {scales: {x}, ...other} of plots) if (x.min !== min || x.max !== max) other.setScale("x", {min, max});
    }

    function draw() {
      const before = plots, view = before[0] && {...before[0].scales.x};
      let lost = 0;
      plots = [];
      room.replaceChildren();
      charts.forEach((chart, at) => {
        const base = logarithmic && loggable[at] ? chart.log || 10 : 0;
        const data = joined(shown[at], range);
        if (base) shown[at].forEach((one, column) => {
          if (one.kind === "steps") return;
          data[column + 1] = data[column + 1].map(value => value > 0 || value == null ? value : (lost += 1, null));
        });
        if (chart.title) room.append(make("div", {className: "title"}, chart.title));
        const place = {width: room.clientWidth, last: at === charts.length - 1, alone: charts.length === 1, key: name};
        place.wide = charts.some(one => one.rows.length);
        const plot = new uPlot(options(chart, shown[at], base, place, zoomed), data, room);
        shown[at].forEach((one, column) => {
          if (before[at]?.series[column + 1].show === false) plot.setSeries(column + 1, {show: false});
        });
        plots.push(plot);
      });
      for (const plot of before) plot.destroy();
      if (view) zoom(view.min, view.max);
      log.setAttribute("aria-pressed", logarithmic);
      note.hidden = !lost;
      note.textContent = `${lost.toLocaleString("en-US")} values of 0 or less are not on the logarithmic axis.`;
      for (const label of room.querySelectorAll(".u-series ~ .u-series th"))
        Object.assign(label, {tabIndex: 0, role: "button", onkeydown: ({key}) => key === "Enter" && label.click()});
    }

    function csv() {
      const all = charts.flatMap((chart, at) => shown[at].map(one => ({
        ...one, values: one.kind === "steps" || chart.rows.length ? one.values.map(() => 1) : one.values,
        name: [charts.length > 1 && (chart.title || chart.unit), one.name, one.end].filter(Boolean).join(", "),
      })));
      const [steps, ...rest] = joined(all, []);
      const same = at => all.slice(0, at + 1).filter(other => other.name === all[at].name).length;
      const names = all.map((one, at) => same(at) > 1 ? `${one.name} (${same(at)})` : one.name);
      const cell = text => `"${text.replace(/^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/, "'$&").replaceAll('"', '""')}"`;
      const lines = steps.map((step, row) => [step, ...rest.map(column => column[row] ?? "")]);
      return [["step", ...names.map(cell)], ...lines, ""].join("\n");  // inner arrays are joined by commas
    }

    function picture() {
      const ratio = devicePixelRatio, line = 18 * ratio, canvas = make("canvas", {}), pen = canvas.getContext("2d");
      const entries = plots.map((plot, at) => shown[at].filter((one, column) =>
        one.lead === column && plot.series[column + 1].show && !charts[at].rows.length));
      canvas.width = plots[0].ctx.canvas.width;
      canvas.height = plots.reduce((sum, {height}, at) => sum + height * ratio + line * (entries[at].length + 1.5), 0);
      Object.assign(pen, {fillStyle: "#fff", textBaseline: "middle", font: FONT.replace("12", 12 * ratio)});
      pen.fillRect(0, 0, canvas.width, canvas.height);
      let top = 0;
      plots.forEach((plot, at) => {
        pen.fillStyle = INK;
        pen.fillText(charts[at].title, 8 * ratio, top + line / 2);
        pen.drawImage(plot.ctx.canvas, 0, top + line);
        top += line * 1.5 + plot.ctx.canvas.height;
        for (const one of entries[at]) {
          pen.fillStyle = one.colour;
          pen.fillText(one.kind in LINES ? "━" : GLYPHS[one.marker] ?? "■", 8 * ratio, top);
          pen.fillStyle = INK;
          pen.fillText(one.name, 28 * ratio, top);
          top += line;
        }
      });
      canvas.toBlob(blob => save(`${name}.png`, blob));
    }

    room.classList.toggle("long", shown.flat().some(one => one.low.length || one.name.length > 26));
    figure.firstElementChild.after(make("div", {className: "live"}, tools, room, note));
    new ResizeObserver(() => {
      if (!figure.clientWidth) return;  // inside a closed fold
      figure.classList.add("answers");
      for (const plot of plots) plot.setSize({width: room.clientWidth, height: plot.height});
      if (!plots.length) try { draw(); } catch (error) { figure.classList.remove("answers"); throw error; }
    }).observe(figure);
  }

  const NUMBER = /^[-+−]?[\d.,:^∞]+(e[-+]?\d+)?(\s?(%|[kMGT]?B))?$/;
  const UNITS = {k: 1e3, kB: 1e3, M: 1e6, MB: 1e6, G: 1e9, GB: 1e9, T: 1e12, TB: 1e12};

  // The number that a cell begins with, such as 12:05 (a duration), 2^16, 3.3 % or 4.2 kB; NaN for none.
  function number(text) {
    const plain = text.trim().replaceAll(",", "").replace("−", "-");
    const time = /^(?:(\d+):)?(\d+):(\d\d)$/.exec(plain), power = /^2\^(-?\d+)/.exec(plain);
    if (time) return (time[1] ?? 0) * 3600 + time[2] * 60 + +time[3];
    if (power) return 2 ** power[1];
    if (/^[+-]?∞/.test(plain)) return plain[0] === "-" ? -Infinity : Infinity;
    const found = /^([+-]?\d*\.?\d+(?:e[+-]?\d+)?)(?:\s*([kMGT]B?)\b)?/i.exec(plain);
    return found ? found[1] * (UNITS[found[2]] ?? 1) : NaN;
  }

  function sortable(table) {
    const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, at) => {
      const texts = rows.map(row => row.cells[at].textContent.trim());
      const known = texts.filter(text => text && text !== "–");
      const numeric = head.classList.contains("n") || known.every(text => NUMBER.test(text));
      const keys = texts.map(text => numeric ? number(text) : text);
      const missing = row => numeric ? isNaN(keys[row]) : !keys[row];
      const order = (one, other) => numeric
        ? keys[one] - keys[other] || 0 : keys[one].localeCompare(keys[other], "en", {numeric: true});
      const sort = () => {
        const next = {ascending: "descending", descending: ""}[head.ariaSort] ?? "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        if (next) head.ariaSort = next;
        const turn = {ascending: 1, descending: -1}[next], places = [...rows.keys()];
        places.sort((one, other) => turn && (missing(one) - missing(other) || turn * order(one, other)) || one - other);
        table.tBodies[0].append(...places.map(row => rows[row]));
      };
      const press = button("", "sort", sort);
      press.append(...(head.textContent ? head.childNodes : ["#"]));
      head.append(press);
    });
    if (rows.length <= 15) return;
    const count = make("span", {className: "note"});
    const box = make("input", {type: "search", placeholder: "filter rows", ariaLabel: "filter rows", oninput: () => {
      const wanted = box.value.trim().toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      count.textContent = wanted ? `${rows.filter(row => !row.hidden).length} of ${rows.length} rows` : "";
    }});
    table.closest(".scroll").before(make("div", {className: "filter"}, box, count));
  }

  function stored(use) {
    try { return use(localStorage); } catch { return null; }  // storage may be switched off
  }

  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  const kept = stored(storage => storage.getItem("mptrain-theme"));
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  const other = () => theme() === "dark" ? "light" : "dark";
  const name = () => { toggle.textContent = `${other()} theme`; };
  const toggle = button("", "", () => {
    root.dataset.theme = other();
    stored(storage => storage.setItem("mptrain-theme", theme()));
    name();
  });
  toggle.className = "theme";
  name();
  dark.addEventListener("change", name);
  document.querySelector("header").prepend(toggle);

  document.querySelectorAll("figure[data-charts]").forEach(answer);
  for (const table of document.querySelectorAll(".scroll table")) if (table.tBodies[0].rows.length > 1) sortable(table);

  // A run that trains: reload, but not while the reader is at something that the new page would forget.
  const IN_USE = "figure:hover, figure.zoomed, details[open], .u-series.u-off, th[aria-sort]";
  const busy = () => document.querySelector(IN_USE) || [...document.querySelectorAll("input")].some(box => box.value);
  if (root.dataset.reload) setInterval(() => busy() || location.reload(), 1000 * root.dataset.reload);
})();
