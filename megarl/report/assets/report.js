"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [1, 4]];
  const BORDERS = ["solid", "dashed", "dotted"];
  const HEIGHT = 215;
  const FEW = 20; // points of a line that have dots
  const STEPS = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));
  let axis = "step";
  let plots = [];

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const several = page.names.length > 1;
  // Runs have colors and lines have dashes; a single run needs no color, so its lines have them.
  const colorOf = (line) => "--run" + ((several ? line.run : line.style) % 8);

  function format(value, unit, digits = 3) {
    if (value == null) return "–";
    if (unit === "share") return trim(value * 100, digits) + "%";
    const size = Math.abs(value);
    for (const [least, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= least) return trim(value / (letter === "k" ? 1e3 : least), digits) + letter;
    }
    return trim(value, digits);
  }

  function trim(value, digits) {
    if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(digits - 2);
    return String(Number(value.toPrecision(Math.abs(value) >= 1000 ? digits + 1 : digits)));
  }

  // The labels of an axis, with enough digits that no two are equal and none is rounded by a visible part of a step.
  function labelsOf(splits, unit) {
    const step = splits.length > 1 ? Math.abs(splits[1] - splits[0]) : Infinity;
    let labels = [];
    for (let digits = 3; digits < 8; digits++) {
      labels = splits.map((each) => format(each, unit, digits));
      const exact = splits.every((each) => Math.abs(Number(each.toPrecision(digits)) - each) < step / 10);
      if (exact && new Set(labels).size === labels.length) break;
    }
    return labels;
  }

  function nameOf(line) {
    return [several ? page.names[line.run] : "", line.label].filter(Boolean).join(", ") || "mean";
  }

  // One table per line: positions, values and the ends of the band; positions without a number are left out.
  function tableOf(line) {
    const xs = (line.x || page.axes[line.run])[axis];
    const columns = line.low ? [line.y, line.low, line.high] : [line.y];
    const kept = xs.map((x, index) => index).filter((index) => xs[index] != null);
    return [kept.map((index) => xs[index]), ...columns.map((column) => kept.map((index) => column[index]))];
  }

  // The newest number of a column: what a legend shows while nothing is pointed at.
  function newest(values) {
    for (let index = values.length - 1; index >= 0; index--) if (values[index] != null) return index;
    return null;
  }

  function nearest(values, index) {
    for (let distance = 0; distance < 60; distance++) {
      if (values[index - distance] != null) return index - distance;
      if (values[index + distance] != null) return index + distance;
    }
    return null;
  }

  function seriesOf(figure) {
    const series = [{ label: axis === "step" ? "step" : "hours", value: (plot, x) => trim(x ?? plot.data[0].at(-1) ?? 0) }];
    const bands = [];
    for (const line of figure.lines) {
      const at = series.length;
      const color = colorOf(line);
      series.push({
        label: nameOf(line),
        style: several || line.label ? line.style : 0,
        stroke: () => variable(color),
        width: 1.6,
        dash: DASHES[(several || line.label ? line.style : 0) % DASHES.length],
        spanGaps: true,
        points: { show: line.dots || line.y.length <= FEW, size: 6, fill: () => variable("--card") },
        value: (plot, _, number, pointed) => {
          const index = pointed ?? newest(plot.data[number]);
          if (index == null) return "–";
          const text = format(plot.data[number][index], figure.unit);
          if (!line.low) return text;
          const ends = [number + 1, number + 2].map((edge) => format(plot.data[edge][index], figure.unit));
          return text + " (" + ends.join(" to ") + ")";
        },
      });
      if (line.low) {
        const edge = { class: "edge", stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge, label: "low" }, { ...edge, label: "high" });
        bands.push({ series: [at + 2, at + 1], fill: () => variable(color) + "33" });
      }
    }
    return { series, bands };
  }

  function draw(box, figure) {
    const data = uPlot.join(figure.lines.map(tableOf));
    const { series, bands } = seriesOf(figure);
    const ticks = { stroke: () => variable("--grid"), width: 1 };
    const axes = { stroke: () => variable("--soft"), grid: ticks, ticks, font: "11.5px system-ui, sans-serif" };
    const share = figure.unit === "share";
    const options = {
      width: Math.max(200, box.clientWidth),
      height: HEIGHT,
      scales: {
        x: { time: false },
        y: { range: (plot) => rangeOf(plot, figure.lines, share) },
      },
      series,
      bands,
      legend: { markers: { width: 2, dash: (_, number) => BORDERS[series[number].style % BORDERS.length] } },
      axes: [
        { ...axes, size: 30, values: (_, splits) => labelsOf(splits, ""),
          incrs: axis === "step" ? STEPS : undefined },
        { ...axes, size: (_, values) => 20 + 7.5 * Math.max(2, ...(values || []).map((each) => (each || "").length)),
          values: (_, splits) => labelsOf(splits, figure.unit) },
      ],
      cursor: {
        sync: { key: "megarl", scales: ["x", null] },
        points: { size: 6 },
        dataIdx: (plot, number, index) => (number && index != null ? nearest(plot.data[number], index) : index),
      },
    };
    options.hooks = { draw: [drawAlarms, (plot) => drawBeyond(plot, figure)] };
    const plot = new uPlot(options, data, box);
    plot.setLegend({ idx: null });
    plots.push(plot);
  }

  // The columns of each line in the data of a plot: its values, and the ends of its band or the values again.
  function columnsOf(plot, lines) {
    let number = 1;
    return lines.map((line) => {
      const first = number;
      number += line.low ? 3 : 1;
      return line.low ? plot.data.slice(first, number) : Array(3).fill(plot.data[first]);
    });
  }

  // The ends of a line, without values that lie far beyond nearly all others: they would flatten the plot.
  function ends(columns) {
    const values = columns.flat().filter((each) => each != null).sort((a, b) => a - b);
    const at = (share) => values[Math.round(share * (values.length - 1))];
    const far = 3 * (at(0.9) - at(0.1)) || 9 * Math.abs(at(0.5));
    if (values.length < 8 || far === 0) return [values[0], values.at(-1)];
    const kept = values.filter((each) => each >= at(0.1) - far && each <= at(0.9) + far);
    return [kept[0], kept.at(-1)];
  }

  // A triangle at the edge for each point beyond it, in the color of its line.
  function drawBeyond(plot, figure) {
    const { ctx, bbox } = plot;
    const { min, max } = plot.scales.y;
    const size = 5 * devicePixelRatio;
    columnsOf(plot, figure.lines).forEach(([values, low, high], number) => {
      ctx.fillStyle = variable(colorOf(figure.lines[number]));
      plot.data[0].forEach((x, index) => {
        const place = plot.valToPos(x, "x", true);
        if (values[index] == null || place < bbox.left || place > bbox.left + bbox.width) return;
        const above = [(high[index] ?? values[index]) > max, bbox.top, 1];
        const below = [(low[index] ?? values[index]) < min, bbox.top + bbox.height, -1];
        for (const [beyond, tip, inner] of [above, below]) {
          if (!beyond) continue;
          ctx.beginPath();
          ctx.moveTo(place, tip);
          ctx.lineTo(place - size, tip + 1.6 * inner * size);
          ctx.lineTo(place + size, tip + 1.6 * inner * size);
          ctx.fill();
        }
      });
    });
  }

  // A dashed line at the beginning of each alarm, with the name of its rule where there is room.
  function drawAlarms(plot) {
    const { ctx, bbox } = plot;
    let free = bbox.left;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = variable("--bad");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.textAlign = "left";
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [run, step, rule] of page.alarms) {
      const axes = page.axes[run];
      const index = axes.step.findIndex((each) => each != null && each >= step);
      const x = axis === "step" ? step : axes.hours[index];
      const place = x == null ? NaN : plot.valToPos(x, "x", true);
      if (!(place >= bbox.left && place <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(place, bbox.top);
      ctx.lineTo(place, bbox.top + bbox.height);
      ctx.stroke();
      const width = ctx.measureText(rule).width;
      if (place < free || place + width > bbox.left + bbox.width) continue;
      ctx.fillText(rule, place + 3 * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
      free = place + width + 6 * devicePixelRatio;
    }
    ctx.restore();
  }

  // Some room around the values, shares within their limits, and never an empty range.
  function rangeOf(plot, lines, share) {
    const [from, to] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
    const windows = columnsOf(plot, lines).map((columns) => columns.map((column) => column.slice(from, to + 1)));
    const all = windows.flatMap(ends).filter((each) => each != null);
    if (!all.length) return [0, 1];
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    let [bottom, top] = [low - room, high + room];
    if (low >= 0) bottom = low < 0.5 * high ? 0 : Math.max(0, bottom);
    if (share && high <= 1) top = Math.min(top, 1.004); // no tick above 100%
    return [bottom, top];
  }

  function drawAll() {
    for (const plot of plots) plot.destroy();
    plots = [];
    const boxes = new Map([...document.querySelectorAll("[data-figure]")].map((box) => [box.dataset.figure, box]));
    for (const figure of page.figures) draw(boxes.get(figure.key), figure);
  }

  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const each of document.querySelectorAll("[data-axis]")) {
        each.setAttribute("aria-pressed", String(each === button));
      }
      drawAll();
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    for (const plot of plots) plot.redraw(false, true);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      for (const plot of plots) {
        plot.setSize({ width: Math.max(200, plot.root.parentElement.clientWidth), height: HEIGHT });
      }
    }, 100);
  });
  drawAll();
})();
