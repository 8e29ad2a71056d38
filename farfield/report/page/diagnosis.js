"use strict";
// Figures of a diagnosis, drawn in the theme in force; the page's own script may be beside it.
(() => {
  const held = document.getElementById("diagnosis-figures");
  if (!held) return;
  const root = document.documentElement;
  const page = JSON.parse(held.textContent);
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const printing = matchMedia("print");
  let inPrint = printing.matches;
  const dark = () => !inPrint && (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const paper = () => dark()
    ? { ink: "#eceeef", soft: "#a3abb3", line: "#4a5158", grid: "#2a2f34", back: "#14171a", warm: "#f2763a" }
    : { ink: "#16191d", soft: "#59616b", line: "#b4bbc2", grid: "#e9ecef", back: "#ffffff", warm: "#d65e00" };
  const faded = (colour, alpha) => {
    const part = (at) => parseInt(colour.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  };
  const STROKES = {
    main: { width: 2.4 }, gate: { width: 2, dash: "dashdot" }, thin: { width: 0.8 },
    predicted: { width: 2.2, dash: "dash" }, guess: { width: 1.4, dash: "dot" },
    guess2: { width: 1.4, dash: "dashdot" }, bound: { width: 1.4, dash: "longdash" },
    floor: { width: 1, dash: "dot" }, rule: { width: 1 },
  };

  function painted(trace) {
    const { model, role } = trace.meta;
    const p = paper();
    if (role === "heat") {
      return { ...trace, colorscale: [[0, dark() ? "#1d2125" : "#f6f7f8"], [1, p.warm]],
        textfont: { size: 11, color: p.ink } };
    }
    const ink = model && page.inks[model] ? page.inks[model][dark() ? "dark" : "light"] : p.soft;
    const colour = ["guess", "guess2", "bound", "floor", "rule"].includes(role) ? p.soft
      : role === "predicted" ? p.warm : ink;
    const copy = { ...trace, showlegend: Boolean(trace.name) && role !== "thin",
      line: { ...STROKES[role], color: colour } };
    if (page.inks[model] && page.many && role === "main") copy.line.dash = page.inks[model].dash;
    if (trace.marker) copy.marker = { ...trace.marker, color: colour };
    if (trace.mode === "markers" && role === "guess2") copy.marker.line = { width: 1.6, color: colour };
    if (role === "thin") { copy.opacity = 0.35; }
    copy.hoverlabel = { bgcolor: p.back, bordercolor: colour, font: { color: p.ink } };
    return copy;
  }

  function axis(given) {
    const p = paper();
    return { ...given, color: p.soft, gridcolor: p.grid, linecolor: p.line, tickcolor: p.line,
      title: { ...given.title, standoff: 8, font: { size: 13, color: p.soft } },
      tickfont: { size: 12, color: p.soft } };
  }

  function draw(node) {
    const figure = page.figures[node.dataset.figure];
    const width = inPrint ? Math.min(676, node.clientWidth) : Math.floor(node.getBoundingClientRect().width);
    if (!figure || !width) return;
    node.dataset.width = String(width);
    const p = paper();
    const heat = figure.data[0].meta.role === "heat";
    const layout = {
      ...figure.layout, autosize: false, width, height: figure.height || node.clientHeight || 380,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: p.ink, size: 13 },
      margin: heat ? { l: 40, r: 8, t: 6, b: 42 } : { l: 58, r: 12, t: 10, b: 56 },
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      hovermode: "closest", dragmode: false,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: p.ink } },
      shapes: (figure.layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: p.soft } })),
    };
    if (width < 520 && layout.xaxis.ticktext) {
      layout.xaxis.ticktext = layout.xaxis.ticktext.map((t, i, all) => ((all.length - 1 - i) % 2 ? "" : t));
    }
    Plotly.react(node, figure.data.map(painted), layout, { displaylogo: false, displayModeBar: false });
  }

  const nodes = [...document.querySelectorAll("[data-figure]")];
  const drawAll = () => nodes.forEach(draw);
  new MutationObserver(drawAll).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  prefersDark.addEventListener("change", drawAll);
  const print = (on) => { if (inPrint !== on) { inPrint = on; drawAll(); } };
  printing.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 80); });
  const button = document.getElementById("theme");
  if (button && page.own) {
    const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      try { localStorage.setItem("farfield-theme", root.dataset.theme); } catch { /* private window */ }
      label();
    });
    prefersDark.addEventListener("change", label);
    label();
  }
  drawAll();
  root.dataset.diagnosed = String(nodes.length);
})();
