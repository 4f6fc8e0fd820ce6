"""What a reader does with an explorer in JupyterLab, in a real browser; skipped where there is none."""

import base64

import torch
from browser import open_notebook, require_browser

import tinyds41 as ds
from tinyds41.show.explore_pool import pool_view
from tinyds41.show.explorer import as_png

CELLS = [
    "import torch\nimport tinyds41 as ds\nfrom tinyds41.show.explore_pool import explore_pool, pool_view",
    "model = ds.Model(ds.Config.preset('nano'), seed=0)\nids = torch.arange(4, 44)[None]",
    "explore_pool(model, ids, name='nano')",
]
# The bytes of the picture on the page.
PICTURE = """async () => {
    const picture = document.querySelector('.jp-OutputArea-output img.widget-image');
    const bytes = new Uint8Array(await (await fetch(picture.src)).arrayBuffer());
    return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(''));
}"""
CHANGED = "before => document.querySelector('.jp-OutputArea-output img.widget-image').src != before"


def expected(**setting: int) -> bytes:
    model, ids = ds.Model(ds.Config.preset("nano"), seed=0), torch.arange(4, 44)[None]
    return as_png(pool_view(model, ids, query=39, name="nano", **setting))


def test_a_moved_slider_shows_the_picture_of_its_setting(tmp_path):
    """Byte for byte what the plain function draws here: the same machine, fonts and weights."""
    with open_notebook(CELLS, tmp_path, require_browser()) as page:
        picture = page.locator(".jp-OutputArea-output img.widget-image")
        picture.wait_for(state="visible")
        assert picture.count() == 1 and page.locator(".jp-OutputArea-output.jp-mod-error, .ansi-red-fg").count() == 0
        assert page.locator(".widget-slider").count() == 3 and page.locator(".widget-dropdown").count() == 1
        assert base64.b64decode(page.evaluate(PICTURE)) == expected()
        before = picture.get_attribute("src")
        page.locator(".widget-slider", has_text="candidate_topk_blocks").locator("[role=slider]").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(CHANGED, arg=before)
        assert base64.b64decode(page.evaluate(PICTURE)) == expected(candidate_topk_blocks=4) != expected()
        assert page.locator(".widget-readout").all_inner_texts() == ["39", "4", "3"]
        size = picture.evaluate("one => [one.width, one.naturalWidth]")
        assert size[0] == size[1]  # not stretched, which would blur it
        page.screenshot(path=tmp_path / "page.png")  # to look at: pytest keeps the folder for a while
