"""The chat page in headless Chromium: Markdown of an untrusted model, drawn while it grows."""

from __future__ import annotations

import json
import random
import re

from page_support import draw

from browser_support import Browser

HOSTILE = [
    ("<img src=x onerror=alert(1)>", "<p", "<img"),
    ("a <script>alert(1)</script> b", "&lt;script&gt;", "<script"),
    ("<svg onload=alert(1)>\n<p>x", "&lt;svg", "<svg"),
    ("[x](javascript:alert(1))", "<span>x</span>", "href"),
    ("[x](JaVa&#115;cript:alert(1))", "<span>x</span>", "href"),
    ("[x](data:text/html,<script>)", "x", "href"),
    ("[x](//evil.example/a)", "<span>x</span>", "href"),
    ("<javascript:alert(1)>", "javascript", "href"),
    ("![cat](https://example.com/cat.png)", "Picture: cat</a>", "<img"),
    ('[x](https://example.com/" onclick="alert(1)")', "x", "<[^>]* onclick"),
    ("```<img>\n</code><img src=x>\n```", "&lt;/code&gt;&lt;img", "<img"),
    ("> " * 5000 + "deep", "deep", "<script"),
]


def test_a_hostile_answer_stays_text(page: Browser) -> None:
    for source, shown, never in HOSTILE:
        html = draw(page, source)
        assert shown in html, source
        assert not re.search(never, html), source
    safe = draw(page, "[x](https://example.com/a?b=1&amp;c=2) <me@example.com>")
    assert 'href="https://example.com/a?b=1&amp;c=2"' in safe
    assert 'href="mailto:me@example.com"' in safe
    assert safe.count('rel="noopener noreferrer nofollow"') == 2
    # Should a node ever be made from HTML after all, the page's policy refuses it.
    caught = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return '' } catch (e) { return e.name } })()"
    )
    assert page.run(caught) == "TypeError"


def test_markdown_is_drawn_as_it_grows(page: Browser) -> None:
    source = (
        "# Title\n\na *b* **c** `d<br>` ~~e~~ 1 < 2 &lt;tag&gt; &amp;amp; x<br>y\n\n"
        "```python\nif a < b:\n    pass\n```\n\n"
        "1. one\n   - two\n2. three\n\n- [x] done\n\n| a | b |\n|:-:|--:|\n| 1 | <br> |\n\n> quoted\n\n---\n"
    )
    whole = draw(page, source)
    assert draw(page, *(source[:end] for end in range(0, len(source), 3)), source) == whole
    for part in (
        "<h3>Title</h3>",
        "<em>b</em> <strong>c</strong> <code>d&lt;br&gt;</code> <del>e</del> 1 &lt; 2 &lt;tag&gt; &amp;amp; x<br>y",
        "<span>python</span>",
        "<code>if a &lt; b:\n    pass</code>",
        "<li>one<ul><li>two</li></ul></li>",
        '<li class="task"><input type="checkbox" disabled="" aria-label="done">',
        '<th class="align-center">a</th>',
        "<blockquote><p>quoted</p></blockquote><hr>",
    ):
        assert part in re.sub(r' class=""| checked=""', "", whole), part


PIECES = (
    "- a\n", "  b\n", "\n", "\n\n", "```\n", "> q\n", "# h\n", "| a |\n", "|--|\n", "words\n", "---\n", "1. x\n",
    "    deep\n", "**b", "`c", "<p>\n", "===\n", "\t- t\n", "* * *\n", "\r\n",
)  # fmt: skip


def test_a_grown_answer_is_drawn_as_a_whole_one(page: Browser) -> None:
    rng = random.Random(0)
    texts = [[rng.choice(PIECES) for _ in range(rng.randint(4, 24))] for _ in range(200)]
    differing = page.run(f"""(async () => {{
        const {{ render }} = await import("/page/markdown.js");
        return {json.dumps(texts)}.filter((pieces) => {{
            const grown = document.createElement("div"), whole = document.createElement("div");
            pieces.forEach((_, at) => render(grown, pieces.slice(0, at + 1).join("")));
            render(whole, pieces.join(""));
            const plain = (node) => node.innerHTML.replace(/\\s/g, ""); // marked strips some tabs late
            return plain(grown) !== plain(whole);
        }}); }})()""")
    assert differing == []


def test_no_text_holds_the_page_up(page: Browser) -> None:
    """Each of these takes marked seconds, and again for every token that follows, if it is read as a paragraph."""
    for text in ("_a_", "[", "*a ", "`a", "![a]("):
        nodes = page.run(f"""(async () => {{
            const {{ render }} = await import("/page/markdown.js");
            const target = document.createElement("div");
            render(target, {json.dumps(text)}.repeat(20000));
            return target.querySelectorAll("*").length; }})()""")
        assert nodes == 1  # one paragraph of text, whose marks were not looked at


def test_blocks_that_are_complete_keep_their_nodes(page: Browser) -> None:
    """A selection in an answer stays while the answer grows, and a long answer costs no more than its last block."""
    kept = page.run("""(async () => {
        const { render } = await import("/page/markdown.js");
        const target = document.createElement("div");
        render(target, "one\\n\\ntwo\\n\\nthr");
        const [one, two, three] = target.children;
        render(target, "one\\n\\ntwo\\n\\nthree");
        return [one === target.children[0], two === target.children[1], three === target.children[2]]; })()""")
    assert kept == [True, True, False]
