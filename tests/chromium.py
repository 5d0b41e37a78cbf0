"""A report in a real browser: opened once, in frames as wide as phones and desks, light and dark."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

import forked

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]

# One browser for all screens: frames as wide as each, in the colour scheme of their element.
WRAPPER = """<!DOCTYPE html><body>{frames}<script>
addEventListener("load", async () => {{
  const seen = [];
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    for (let tries = 0; tries < 200 && !root.dataset.drawn; tries++) await new Promise((done) => setTimeout(done, 50));
    page.querySelector("#links-{clicked} .png").click();
    await new Promise((done) => setTimeout(done, 400));
    const hovered = [];
    for (const plot of page.querySelectorAll(".plot")) {{
      const shown = [];
      for (const area of plot.querySelectorAll(".nsewdrag")) {{
        const box = area.getBoundingClientRect();
        const marks = [...plot.querySelectorAll(".points path")].slice(0, 40).map((one) => one.getBoundingClientRect())
          .map((one) => [one.x + one.width / 2, one.y + one.height / 2]);
        const grid = [0.1, 0.3, 0.5, 0.7, 0.9].flatMap((x) => [0.2, 0.5, 0.8]
          .map((y) => [box.x + x * box.width, box.y + y * box.height]));
        for (const [clientX, clientY] of [...grid, ...marks]) {{
          area.dispatchEvent(new frame.contentWindow.MouseEvent("mousemove", {{clientX, clientY, bubbles: true}}));
          await new Promise((done) => setTimeout(done, 60));
          shown.push(plot.querySelector(".hoverlayer").textContent);
          if (shown.at(-1)) break;
        }}
        if (shown.at(-1)) break;
      }}
      hovered.push(shown.at(-1) || "");
    }}
    seen.push({{
      hovered,
      drawn: [...page.querySelectorAll(".plot")].map((plot) => plot.querySelectorAll(".main-svg").length),
      points: page.querySelectorAll(".plot .points path, .plot .lines path").length,
      errors: root.dataset.errors || "",
      scroll_width: root.scrollWidth,
      width: frame.contentWindow.innerWidth,
      too_wide: [...page.querySelectorAll("main *")].filter((one) => !one.closest(".wide, .plot")
        && one.getBoundingClientRect().right > frame.contentWindow.innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 99)),
      background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      text: page.querySelector(".plot .xtick text").style.fill,
      images: page.querySelectorAll("img").length,
      tables: [...page.querySelectorAll("a.csv")].map((link) => link.download + " " + link.href.slice(0, 5)),
      heading: page.querySelector("tbody tr:last-child th").textContent,
    }});
  }}
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
}});
</script></body>"""


def look_at(report, clicked, folder):
    """What each of `SCREENS` shows of a report, after a click on a figure's picture; skips where there is no browser."""
    if CHROMIUM is None:
        pytest.skip(
            "no chromium, chromium-browser or google-chrome on the PATH: the report was not opened in a browser"
        )
    frames = "".join(
        f'<iframe src="{report.as_uri()}" style="border:0;width:{width}px;height:900px;color-scheme:{scheme}"></iframe>'
        for width, scheme in SCREENS
    )
    (folder / "wrapper.html").write_text(WRAPPER.format(frames=frames, clicked=clicked))
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
        "--disable-background-networking", "--disable-sync", "--allow-file-access-from-files",
        "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *arguments, (folder / "wrapper.html").as_uri()],
        capture_output=True, text=True, timeout=forked.AGAINST_HANGS_S, check=True,
        cwd=folder, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-3000:]
    return dict(zip(SCREENS, json.loads(html.unescape(found[1])), strict=True))
