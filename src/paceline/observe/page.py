"""The report's page: style sheet and script, and nothing that is fetched from elsewhere."""

from __future__ import annotations

__all__ = ["PAGE", "SCRIPT", "STYLE"]

# `string.Template` names: the script and style are full of braces.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
$answer
</header>
$body
</main>
<script>$plotly</script>
<script type="application/json" id="figures">$figures</script>
<script type="application/json" id="colours">$colours</script>
<script>$script</script>
</body>
</html>
"""

STYLE = """
:root { --page: #fff; --text: #1d1f21; --soft: #5c6268; --line: #d5d9dd; --strong: #1d1f21; --bad: #a8321a;
  --shade: #f5f6f7; --link: #0a5c96; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #e6e5e1; --soft: #a3a9b0; --line: #3d4249;
  --strong: #e6e5e1; --bad: #ff9a80; --shade: #1d2024; --link: #7cc0f0; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 17px/1.55 Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Georgia, "Liberation Serif",
  serif; }
main { max-width: 1160px; margin: 0 auto; padding: 48px 32px 80px; }
h1, h2, h3, table, figcaption, .links { font-family: Inter, -apple-system, "Segoe UI", "Helvetica Neue", Arial,
  "Liberation Sans", sans-serif; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 20px; font-weight: 650; }
h2 { font-size: 20px; margin: 56px 0 12px; font-weight: 650; }
h3 { font-size: 16px; margin: 0; font-weight: 650; }
h1, p, figcaption { overflow-wrap: anywhere; }
p { max-width: 44rem; margin: 0 0 12px; }
.answer { font-size: 21px; line-height: 1.45; }
.why { margin-bottom: 6px; }
.caution { color: var(--soft); font-style: italic; }
.wide { overflow-x: auto; margin: 0 0 8px; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: 13px; line-height: 1.35; font-variant-numeric: tabular-nums;
  border-top: 2px solid var(--strong); border-bottom: 2px solid var(--strong); }
.figures-table { min-width: 100%; }
th, td { padding: 7px 7px; text-align: right; vertical-align: top; }
thead th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid var(--strong); }
thead tr.over th[colspan] { border-bottom: 0; padding-bottom: 0; text-align: center; white-space: nowrap; }
thead tr.over th[colspan] span { display: block; border-bottom: 1px solid var(--line); padding-bottom: 3px; }
th small, td small { font-weight: 400; color: var(--soft); display: block; font-size: 12px; }
td.outcome small { min-width: 9em; }
tbody tr + tr td, tbody tr + tr th { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; }
th.name, td.name { text-align: left; }
thead th { white-space: nowrap; }
tbody th.name { min-width: 9em; max-width: 15em; overflow-wrap: break-word; }
td.outcome { text-align: left; max-width: 12em; }
td.bad b { color: var(--bad); }
td.best { font-weight: 700; }
.figures-table th.name { position: sticky; left: 0; background: var(--page); z-index: 1; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
figure { margin: 44px 0 0; break-inside: avoid; page-break-inside: avoid; }
figcaption { font-size: 14px; color: var(--soft); margin-bottom: 6px; }
figcaption h3 { color: var(--text); }
.plot { width: 100%; overflow: hidden; }
.plot .modebar { opacity: 0; transition: opacity 0.2s; }
.plot:hover .modebar { opacity: 1; }
.links { font-size: 13px; margin-top: 2px; }
.links a { margin-right: 16px; }
a { color: var(--link); }
pre { background: var(--shade); padding: 12px 14px; overflow-x: auto; font: 13px/1.5 ui-monospace, SFMono-Regular,
  Menlo, Consolas, "Liberation Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 12px; }
.settings td { text-align: left; overflow-wrap: anywhere; min-width: 7em; }
.settings th { text-align: left; }
.error { color: var(--bad); }
@media (max-width: 640px) {
  body { font-size: 16px; }
  main { padding: 28px 16px 56px; }
  h1 { font-size: 24px; }
  .answer { font-size: 18px; }
  h2 { margin-top: 44px; }
  .wide { margin-left: -16px; margin-right: -16px; padding: 0 16px; }
  .figures-table th.name { left: -16px; padding-left: 16px; }
  tbody th.name { min-width: 8em; max-width: 9.5em; }
}
@media print {
  :root { --page: #fff; --text: #000; --soft: #444; --line: #ccc; --strong: #000; --bad: #a8321a;
    --shade: #f5f6f7; }
  body { font-size: 11pt; }
  main { max-width: none; padding: 0; }
  .links { display: none; }
  .wide { overflow: visible; }
  table { font-size: 8pt; }
  th, td { padding: 3px 5px; }
  .figures-table th.name { position: static; }
  h2 { break-after: avoid; }
}
@page { margin: 16mm; }
"""

SCRIPT = r"""
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
    const rows = [figure.columns.map(([header]) => header)];
    if (figure.rows) rows.push(...figure.rows);
    else for (const trace of figure.traces)
      for (let at = 0; at < trace.x.length; at++)
        rows.push(figure.columns.map(([, key]) => (Array.isArray(trace[key]) ? trace[key][at] : trace[key])));
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
"""
