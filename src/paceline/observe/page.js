"use strict";
(() => {
  const root = document.documentElement;
  const errors = [];
  const failed = (what) => {
    errors.push(String(what));
    root.dataset.errors = errors.join(" | ");
  };
  addEventListener("error", (event) => failed(event.message || event.type));
  addEventListener("unhandledrejection", (event) => failed(event.reason));
  addEventListener("securitypolicyviolation", (event) => failed("blocked " + event.blockedURI));

  const figures = JSON.parse(document.getElementById("figures").textContent);
  const palettes = JSON.parse(document.getElementById("colours").textContent);
  const darkly = matchMedia("(prefers-color-scheme: dark)");
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Colours are names in the data, so that one figure serves both themes; user text is escaped for plotly's own markup.
  const painted = (value, palette, key) => {
    if (Array.isArray(value)) return value.map((item) => painted(item, palette, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, palette, name)]));
    if ((key === "color" || key === "colorscale") && typeof value === "string") return palette[value] || value;
    return key === "name" ? escaped(value) : value;
  };

  const legendRows = (figure, width) => {
    if (!figure.legend) return 0;
    const names = figure.traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const widest = Math.max(...names.map((name) => name.length)) * 7 + 46;
    return Math.ceil(names.length / Math.max(1, Math.floor((width - 20) / widest)));
  };

  const dressed = (figure, theme, width, titled) => {
    const palette = palettes[theme];
    const colour = (name) => palette["@" + name];
    const layout = painted(figure.layout, palette);
    const top = (figure.legend ? 12 + 21 * legendRows(figure, width) : 6) + (titled ? 44 : 0);
    for (const [name, axis] of Object.entries(layout)) {
      if (!/^[xy]axis\d*$/.test(name)) continue;
      Object.assign(axis, { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"),
        tickcolor: colour("line"), automargin: name[0] === "y", zeroline: false,
        ticklabelstandoff: name[0] === "y" ? 5 : 2 });
      axis.showline = name[0] === "x";
      axis.ticks = axis.ticks ?? (name[0] === "x" ? "outside" : "");
      axis.title = Object.assign({ font: { size: 12.5, color: colour("soft") }, standoff: 8 }, axis.title);
      if (name[0] === "x" && width < 500) axis.nticks = axis.nticks ?? 5;
    }
    Object.assign(layout, {
      width, height: figure.height_px + top + 48, autosize: false,
      margin: { l: 46, r: 14, t: top, b: 48 },
      paper_bgcolor: titled ? colour("page") : "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { size: 12, color: colour("text"),
        family: 'Inter, -apple-system, "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif' },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", font: { size: 12.5 },
        traceorder: "normal", bgcolor: "rgba(0,0,0,0)", itemwidth: 30 },
      hoverlabel: { bgcolor: colour("page"), bordercolor: colour("line"), font: { color: colour("text"), size: 12.5 },
        namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("text") },
      dragmode: width < 640 ? false : "zoom", showlegend: figure.legend,
    });
    if (titled)
      layout.title = { text: escaped(figure.title), x: 0, xref: "paper", xanchor: "left", y: 1, yref: "container",
        yanchor: "top", pad: { t: 16 }, font: { size: 17, color: colour("text") } };
    return { data: painted(figure.traces, palette), layout };
  };

  const save = (figure) => {
    const theme = darkly.matches ? "dark" : "light";
    const { data, layout } = dressed(figure, theme, 960, true);
    Plotly.downloadImage({ data, layout }, { format: "png", scale: 2, width: 960, height: layout.height,
      filename: figure.name }).catch(failed);
  };

  const csv = (figure) => {
    const quoted = (cell) => {
      let text = cell === null || cell === undefined ? "" : String(cell);
      if (typeof cell === "string" && /^[=+\-@\t\r]/.test(cell)) text = "'" + text;  // no formulas in spreadsheets
      return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
    };
    const rows = figure.table.length ? figure.table : [Object.keys(figure.columns)];
    const keys = Object.values(figure.columns);
    for (const trace of figure.table.length ? [] : figure.traces)
      for (let at = 0; at < trace.x.length && keys.every((key) => key in trace); at++)
        rows.push(keys.map((key) => (Array.isArray(trace[key]) ? trace[key][at] : trace[key])));
    return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
  };

  const draw = (theme, width) => Promise.all(figures.map((figure) => {
    const place = document.getElementById("plot-" + figure.name);
    const { data, layout } = dressed(figure, theme, width || place.clientWidth, false);
    place.style.minHeight = "";
    const png = { name: "png", title: "Download as PNG", icon: Plotly.Icons.camera, click: () => save(figure) };
    return Plotly.react(place, data, layout, {
      displaylogo: false, displayModeBar: layout.width >= 640,
      modeBarButtons: [[png], ["zoom2d", "pan2d", "resetScale2d"]],
    });
  }));
  const redraw = () => draw(darkly.matches ? "dark" : "light").catch(failed);

  for (const figure of figures) {
    const links = document.getElementById("links-" + figure.name);
    const png = links.querySelector(".png"), table = links.querySelector(".csv");
    png.addEventListener("click", (event) => { event.preventDefault(); save(figure); });
    table.href = URL.createObjectURL(new Blob([csv(figure)], { type: "text/csv" }));
    table.download = figure.name + ".csv";
  }
  let waiting = 0, lastWidth = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === lastWidth) return;  // phones change their height while scrolling
    lastWidth = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });
  darkly.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { draw("light", 660); });
  addEventListener("afterprint", redraw);
  redraw().then(() => { root.dataset.drawn = document.querySelectorAll(".plot .main-svg").length; });
})();
