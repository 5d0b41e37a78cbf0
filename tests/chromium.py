"""Pages in a real browser, in frames as wide as phones and desks, light and dark: a report, or all of a site."""

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

# A page around what is looked at: once all is loaded, its function returns what it has seen.
PAGE = """<!DOCTYPE html><body>{frames}<script>
addEventListener("load", async () => {{
  const seen = await (async () => {{
{script}
  }})();
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
}});
</script></body>"""

# One browser for all screens: frames as wide as each, in the colour scheme of their element.
REPORT = """
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
  return seen;
"""


def in_browser(script, folder, frames=""):
    """What the console said while a page with these frames was open, and what the script returned in it."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH: no page was opened in a browser")
    (folder / "wrapper.html").write_text(PAGE.format(frames=frames, script=script))
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
        "--disable-background-networking", "--disable-sync", "--allow-file-access-from-files",
        "--window-size=1400,1000", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *arguments, (folder / "wrapper.html").as_uri()],
        capture_output=True, text=True, timeout=forked.AGAINST_HANGS_S, check=True,
        cwd=folder, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return said, json.loads(html.unescape(found[1]))


def look_at(report, clicked, folder):
    """What each of `SCREENS` shows of a report, after a click on a figure's picture; skips where there is no browser."""
    frames = "".join(
        f'<iframe src="{report.as_uri()}" style="border:0;width:{width}px;height:900px;color-scheme:{scheme}"></iframe>'
        for width, scheme in SCREENS
    )
    _, seen = in_browser(REPORT.format(clicked=clicked), folder, frames)
    return dict(zip(SCREENS, seen, strict=True))


# All pages of a site one after the other: a phone in the dark beside a desk in the light, and for every other page reversed.
PAGES = """
  const pages = {pages}, screens = {screens}, seen = [];
  const frames = screens.map(([width, scheme]) => {{
    const frame = document.createElement("iframe");
    frame.style.cssText = `border:0;width:${{width}}px;height:900px;color-scheme:${{scheme}}`;
    document.body.append(frame);
    return frame;
  }});
  for (const [number, url] of pages.entries()) {{
    const shown = screens.map((_, index) => index).filter((index) => (index == 0 || index == 3) == (number % 2 == 0));
    await Promise.all(shown.map((index) => new Promise((done) => {{
      frames[index].onload = done;
      frames[index].src = url;
    }})));
    for (const index of shown) {{
      const frame = frames[index], page = frame.contentDocument;
      seen.push({{
        url, screen: screens[index],
        scroll_width: page.documentElement.scrollWidth,
        heading: page.querySelector("h1")?.textContent || "",
        background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
        broken_images: [...page.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src),
      }});
    }}
  }}
  return seen;
"""

SEARCH = """
  const found = {{}};
  for (const words of {questions}) {{
    const frame = document.createElement("iframe");
    await new Promise((done) => {{
      frame.onload = done;
      frame.src = "{url}?q=" + encodeURIComponent(words);
      document.body.append(frame);
    }});
    const page = frame.contentDocument;
    const said = () => page.querySelector("#search-results .search-summary")?.textContent || "";
    for (let tries = 0; tries < 100 && !said().includes("found"); tries++) await new Promise((done) => setTimeout(done, 100));
    found[words] = [...page.querySelectorAll("#search-results li a")].map((link) => link.href);
    frame.remove();
  }}
  return found;
"""


def pages_shown(pages, folder):
    """What the console said, and what two of `SCREENS` show of each page; skips where there is no browser."""
    urls = json.dumps([page.as_uri() for page in pages])
    return in_browser(PAGES.format(pages=urls, screens=json.dumps(SCREENS)), folder)


def search_found(page, questions, folder):
    """What the console said, and by question the links that a site's search page finds; skips where there is no browser."""
    return in_browser(SEARCH.format(url=page.as_uri(), questions=json.dumps(list(questions))), folder)
