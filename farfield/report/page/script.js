"use strict";
(() => {
  const root = document.documentElement;
  const page = JSON.parse(document.getElementById("figures").textContent);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const printing = matchMedia("print");
  const hidden = new Set();
  const plots = new Map();
  let inPrint = printing.matches;

  const dark = () => !inPrint && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const inkOf = (name) => page.inks[name][dark() ? "dark" : "light"];
  const paper = () => dark()
    ? { ink: "#eceeef", soft: "#a3abb3", line: "#4a5158", grid: "#2a2f34", back: "#1d2125" }
    : { ink: "#16191d", soft: "#59616b", line: "#b4bbc2", grid: "#e9ecef", back: "#ffffff" };

  const faded = (colour, alpha) => {
    const part = (at) => parseInt(colour.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  };

  // A trace in the theme in force; its mechanism says the colour, its role the rest.
  function painted(trace) {
    const { mechanism, role } = trace.meta;
    const colour = role === "baseline" || role === "rule" ? paper().soft : inkOf(mechanism);
    const copy = { ...trace, showlegend: false, visible: !hidden.has(mechanism) };
    copy.line = { ...trace.line, color: colour };
    if (trace.marker) copy.marker = { ...trace.marker, color: colour };
    if (role === "band") copy.fillcolor = faded(colour, 0.15);
    copy.hoverlabel = { bgcolor: paper().back, bordercolor: colour, font: { color: paper().ink } };
    return copy;
  }

  function axis(given, narrow, small) {
    const p = paper();
    const copy = { ...given, color: p.soft, gridcolor: p.grid, linecolor: p.line, tickcolor: p.line };
    copy.title = { ...given.title, standoff: 8, font: { size: small ? 11 : 13, color: p.soft } };
    copy.tickfont = { size: small || narrow ? 11 : 12, color: p.soft };
    return copy;
  }

  function layoutOf(plot, width) {
    const { figure, kind } = plot;
    const p = paper();
    const narrow = width < 620;
    const small = kind === "panel";
    const labelled = kind === "big" && !narrow;
    const layout = {
      ...figure.layout,
      autosize: false, width, height: plot.node.clientHeight,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: p.ink, size: 13 },
      margin: { l: small ? 44 : 58, r: labelled ? labelRoom(figure) : 14, t: 10, b: small ? 40 : 56, pad: 0 },
      dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
      xaxis: axis(figure.layout.xaxis, narrow, small), yaxis: axis(figure.layout.yaxis, narrow, small),
      hoverlabel: { align: "left" }, annotations: [], uirevision: "kept",
    };
    if (narrow && kind === "big") {
      const { tickvals, ticktext } = layout.xaxis;
      layout.xaxis.ticktext = ticktext.map((t, i) => ((tickvals.length - 1 - i) % 2 ? "" : t));
    }
    layout.shapes = (figure.layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: p.soft } }));
    if (labelled) layout.annotations = endLabels(plot, layout);
    return layout;
  }

  function labelRoom(figure) {
    const names = figure.data.filter((t) => t.meta.role === "pooled").map((t) => t.name);
    return Math.min(300, 40 + 8 * Math.max(...names.map((name) => name.length)));
  }

  // One label at the right end of every line shown, pushed apart where they would overlap.
  function endLabels(plot, layout) {
    const [low, high] = plot.range || layout.yaxis.range;
    const tall = layout.height - layout.margin.t - layout.margin.b;
    const place = (value) => ((high - Math.log10(value)) / (high - low)) * tall;
    const labels = plot.figure.data
      .filter((t) => t.meta.role === "pooled" && !hidden.has(t.meta.mechanism))
      .map((t) => ({ trace: t, x: t.x[t.x.length - 1], y: t.y[t.y.length - 1] }))
      .map((label) => ({ ...label, at: place(label.y) }))
      .filter((label) => label.at >= 0 && label.at <= tall)
      .sort((a, b) => a.at - b.at);
    const step = 17;
    labels.forEach((label, i) => {
      label.put = i ? Math.max(label.at, labels[i - 1].put + step) : label.at;
    });
    for (let i = labels.length - 1, floor = tall; i >= 0; i -= 1, floor -= step) {
      labels[i].put = Math.min(labels[i].put, floor);
      floor = labels[i].put;
    }
    return labels.map(({ trace, x, y, at, put }) => ({
      x: Math.log10(x), y: Math.log10(y), xanchor: "left", yanchor: "middle", align: "left",
      text: trace.name, font: { size: 13, color: inkOf(trace.meta.mechanism) },
      showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: faded(inkOf(trace.meta.mechanism), 0.6),
      ax: 24, ay: put - at, standoff: 6,
    }));
  }

  const config = {
    displaylogo: false, responsive: false, doubleClick: "reset",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d"],
  };

  // Paper is narrower than the screen that is laid out while printing begins: see style.css.
  const printWidths = { big: 676, mid: 330, panel: 212 };

  function draw(plot) {
    const onScreen = Math.floor(plot.node.getBoundingClientRect().width);
    const width = inPrint ? printWidths[plot.kind] : onScreen;
    if (!width) return;
    plot.width = width;
    Plotly.react(plot.node, plot.figure.data.map(painted), layoutOf(plot, width), config);
    if (!plot.listening && plot.kind === "big") {
      plot.listening = true;
      plot.node.on("plotly_relayout", (change) => {
        if (!Object.keys(change).some((key) => key.startsWith("yaxis"))) return;
        plot.range = plot.node.layout.yaxis.range;
        Plotly.relayout(plot.node, { annotations: endLabels(plot, plot.node.layout) });
      });
    }
  }
  const drawAll = () => plots.forEach(draw);

  function add(id, figure, kind) {
    const node = document.getElementById(id);
    if (node && figure) plots.set(id, { node, figure, kind });
  }

  function press(buttons, chosen) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === chosen)));
  }

  const protocolButtons = [...document.querySelectorAll("[data-protocol]")];
  function choose(button) {
    const protocol = button.dataset.protocol;
    press(protocolButtons, button);
    document.querySelectorAll("[data-about]").forEach((note) => {
      note.hidden = note.dataset.about !== protocol;
    });
    add("ratio", page.ratio[protocol], "big");
    const plot = plots.get("ratio");
    plot.range = null;
    // A fresh plot: the zoom of one protocol means nothing in another.
    Plotly.purge(plot.node);
    draw(plot);
  }
  protocolButtons.forEach((button) => button.addEventListener("click", () => choose(button)));

  document.querySelectorAll("[data-mechanism]").forEach((button) => {
    button.addEventListener("click", () => {
      const name = button.dataset.mechanism;
      if (!hidden.delete(name)) hidden.add(name);
      document.querySelectorAll("[data-mechanism]").forEach((other) => {
        if (other.dataset.mechanism === name) other.setAttribute("aria-pressed", String(!hidden.has(name)));
      });
      document.querySelectorAll("[data-panel]").forEach((panel) => {
        panel.hidden = hidden.has(panel.dataset.panel);
      });
      drawAll();
    });
  });

  const themeButton = document.getElementById("theme");
  const label = () => { themeButton.textContent = dark() ? "Light" : "Dark"; };
  themeButton.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("farfield-theme", root.dataset.theme); } catch { /* private window */ }
    label();
    drawAll();
  });
  prefersDark.addEventListener("change", () => { label(); drawAll(); });

  const print = (on) => { if (inPrint !== on) { inPrint = on; drawAll(); } };
  printing.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => plots.forEach((plot) => {
      if (Math.floor(plot.node.getBoundingClientRect().width) !== plot.width) draw(plot);
    }), 80);
  });

  label();
  page.positions.forEach((panel, i) => add(`position-${i}`, panel, "panel"));
  Object.entries(page.training).forEach(([key, figure]) => add(`training-${key}`, figure, "mid"));
  drawAll();
  if (protocolButtons.length) choose(protocolButtons[0]);
  root.dataset.drawn = String(plots.size);
})();
