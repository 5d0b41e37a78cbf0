"""The report in a real browser: every figure drawn, no script error, nothing wider than a phone."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from paceline.observe.report import write_report

from .synthetic import METHODS, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]
HOSTILE = "x<img src=x onerror=document.documentElement.dataset.errors='ran'></script>&amp;"

# One browser for all screens: frames as wide as each, in the colour scheme of their element.
WRAPPER = """<!DOCTYPE html><body>{frames}<script>
addEventListener("load", async () => {{
  const seen = [];
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    for (let tries = 0; tries < 200 && !root.dataset.drawn; tries++) await new Promise((done) => setTimeout(done, 50));
    page.querySelector("#links-lanes .png").click();
    await new Promise((done) => setTimeout(done, 400));
    seen.push({{
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


@pytest.fixture(scope="module")
def screens(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip(
            "no chromium, chromium-browser or google-chrome on the PATH: the report was not opened in a browser"
        )
    folder = tmp_path_factory.mktemp("chromium")
    runs = [make_run(method, slow=2, steps=150) for method in METHODS]
    runs += [make_run("hogwild(step_size=0.5)", diverged_at=80, steps=150), make_run(HOSTILE, steps=60)]
    write_report(runs, folder / "report.html", title=HOSTILE, command=HOSTILE)
    frames = "".join(
        f'<iframe src="report.html" style="border:0;width:{width}px;height:900px;color-scheme:{scheme}"></iframe>'
        for width, scheme in SCREENS
    )
    (folder / "wrapper.html").write_text(WRAPPER.format(frames=frames))
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
        "--disable-background-networking", "--disable-sync", "--allow-file-access-from-files",
        "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *arguments, (folder / "wrapper.html").as_uri()],
        capture_output=True, text=True, timeout=150, check=True, cwd=folder, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-3000:]
    return dict(zip(SCREENS, json.loads(html.unescape(found[1])), strict=True))


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_every_figure_is_drawn_without_an_error(screens, screen):
    seen = screens[screen]
    assert seen["errors"] == ""
    assert len(seen["drawn"]) == 6
    assert all(count >= 2 for count in seen["drawn"])  # plotly draws each figure in layers
    assert seen["points"] > 500


@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_nothing_overflows_sideways(screens, screen):
    seen = screens[screen]
    assert seen["width"] == screen[0]
    assert seen["scroll_width"] <= screen[0]
    assert seen["too_wide"] == []


def test_pages_and_figures_are_dark_where_the_reader_prefers_it(screens):
    assert screens[1280, "light"]["background"] == screens[390, "light"]["background"] == "rgb(255, 255, 255)"
    assert screens[1280, "dark"]["background"] == screens[390, "dark"]["background"] == "rgb(21, 23, 26)"
    assert screens[1280, "light"]["text"] == "rgb(29, 31, 33)"
    assert screens[1280, "dark"]["text"] == "rgb(230, 229, 225)"


def test_text_from_users_stays_text(screens):
    seen = screens[1280, "light"]
    assert seen["images"] == 0
    assert seen["heading"] == HOSTILE


def test_every_figure_offers_its_data(screens):
    names = [
        "loss-against-time",
        "loss-against-samples",
        "accuracy-against-time",
        "staleness",
        "time-per-worker",
        "lanes",
    ]
    assert screens[1280, "light"]["tables"] == [f"{name}.csv blob:" for name in names]
