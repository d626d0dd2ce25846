"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const boxes = () => document.querySelectorAll(".plot");
  const folded = box => box.closest("details:not([open])") !== null;
  let plots = [], printing = false;

  // The library and the numbers of the plots are in the page as gzip in base64.
  async function unpack(id) {
    const letters = atob(document.getElementById(id).textContent);
    const packed = new Blob([Uint8Array.from(letters, letter => letter.charCodeAt(0))]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  async function load() {
    const script = document.createElement("script");
    script.textContent = await unpack("library");
    document.head.append(script);
    plots = JSON.parse(await unpack("plots"));
  }

  // Text, axes, background and the balls of spheres follow the theme; the data keep their colours.
  const inks = name => name === "dark" ? ["#e6e9ed", "#2d333b"] : ["#1b1f24", "#e3e7ec"];
  const ball = name => [0, 1].map(end => [end, inks(name)[1]]);
  const balls = data => data.flatMap((trace, place) => trace.type === "surface" ? [place] : []);
  function colours(layout, name) {
    const [text, grid] = inks(name);
    const change = {
      "font.color": text, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
      "hoverlabel.bgcolor": name === "dark" ? "#2d333b" : "#ffffff", "hoverlabel.font.color": text,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": "#8a8f98", "modebar.activecolor": text,
    };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(key)) continue;
      change[key + ".gridcolor"] = grid;
      change[key + ".linecolor"] = grid;
      change[key + ".tickcolor"] = grid;
    }
    return change;
  }
  function set(target, path, value) {
    const parts = path.split("."), last = parts.pop();
    for (const part of parts) target = target[part] ??= {};
    target[last] = value;
  }
  // A saved plot has a white background, and its own copy of the shared legend.
  function save(box, name) {
    const layout = structuredClone(box.layout), legend = layout.meta && layout.meta.legend;
    for (const [path, value] of Object.entries(colours(layout, "light"))) set(layout, path, value);
    layout.paper_bgcolor = layout.plot_bgcolor = "#ffffff";
    const data = structuredClone(box.data);
    for (const place of balls(data)) data[place].colorscale = ball("light");
    const width = 760;
    let height = Math.max(box.clientHeight, 380);
    if (legend) {
      const named = box.data.filter(trace => trace.showlegend !== false && trace.name).length;
      layout.showlegend = true;
      layout.legend = { orientation: "v", x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 11 } };
      layout.margin = { ...layout.margin, b: 60 + 20 * named };
      height += 20 * named;
    }
    layout.title = { text: html(name), font: { size: 14 }, x: 0.02 };
    layout.margin = { ...layout.margin, t: 44 };
    const scenes = Object.keys(box._fullLayout).filter(key => /^scene\d*$/.test(key));
    for (const key of scenes) layout[key].camera = box._fullLayout[key]._scene.getCamera();
    return Plotly.downloadImage({ data, layout }, { format: "svg", width, height, filename: name.replace(/[^\p{L}\p{N}]+/gu, "-") });
  }
  const html = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  function paint(name, more = () => ({})) {
    for (const box of document.querySelectorAll(".js-plotly-plot")) {
      Plotly.relayout(box, { ...colours(plots[box.dataset.plot].layout, name), ...more(box) });
      if (balls(box.data).length) Plotly.restyle(box, { colorscale: [ball(name)] }, balls(box.data));
    }
  }
  async function draw() {
    await load();
    for (const box of boxes()) {
      const { data, layout, name } = plots[box.dataset.plot];
      for (const [path, value] of Object.entries(colours(layout, dark.matches ? "dark" : "light"))) {
        set(layout, path, value);
      }
      for (const place of balls(data)) data[place].colorscale = ball(dark.matches ? "dark" : "light");
      layout.font = { ...layout.font, family: getComputedStyle(document.body).fontFamily, size: 12 };
      layout.autosize = true;
      // On a touch screen dragging scrolls the page, so 2-D plots must not capture it.
      if (touch) layout.dragmode = false;
      await Plotly.newPlot(box, data, layout, {
        responsive: true, displaylogo: false,
        // Remove the button that uploads a plot.
        showSendToCloud: false, plotlyServerURL: "",
        modeBarButtonsToRemove: ["toImage", "lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "tableRotation", "resetCameraLastSave3d"],
        modeBarButtonsToAdd: [{ name: "save", title: "Download plot", icon: Plotly.Icons.camera, click: () => save(box, name) }],
      });
    }
    document.documentElement.dataset.drawn = boxes().length;
  }
  // A folded plot had no size when it was drawn; when printing, all plots have a fixed width.
  function unfold(details) {
    if (printing || !details.open) return;
    for (const box of details.querySelectorAll(".js-plotly-plot")) {
      if (!folded(box)) Plotly.Plots.resize(box);
    }
  }
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => unfold(details));
  }
  function sort(header) {
    const table = header.closest("table"), place = header.cellIndex;
    const up = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[place].dataset.sort ?? row.cells[place].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      // Empty cells come last in either order.
      if (x === "" || y === "") return (x === "") - (y === "");
      return (!isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(order));
  }
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(button.closest("th")));
  }
  // One legend for the plots of all sections: a click hides or shows a group.
  function toggle(group, shown) {
    for (const button of document.querySelectorAll(".legend button")) {
      if (button.dataset.group === group) button.setAttribute("aria-pressed", shown);
    }
    for (const box of boxes()) {
      const own = (box.data || []).flatMap((trace, place) => trace.legendgroup === group ? [place] : []);
      if (own.length) Plotly.restyle(box, { visible: shown }, own);
    }
  }
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => toggle(button.dataset.group, button.getAttribute("aria-pressed") !== "true"));
  }
  if (boxes().length && !window.DecompressionStream) {
    for (const box of boxes()) box.textContent = "The plots need a browser of 2023 or later.";
  } else if (boxes().length) {
    dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
    addEventListener("beforeprint", () => {
      printing = true;
      for (const box of document.querySelectorAll("details")) box.open = true;
      paint("light", box => ({ width: 640, height: box.clientHeight, autosize: false }));
    });
    addEventListener("afterprint", () => {
      printing = false;
      paint(dark.matches ? "dark" : "light", () => ({ width: null, height: null, autosize: true }));
    });
    draw();
  } else {
    document.documentElement.dataset.drawn = 0;
  }
})();
