"""The card's style: the theme's variables, with plain colours where there is no theme, and where each part stands.

Sent once for each card. What is drawn then has classes only, so that a refresh is small and the page's theme decides.

Runs in: kernel
"""

from __future__ import annotations

from .palette import DARK, LIGHT
from .svg import STYLE as SVG_STYLE

_DARK = "".join(
    [
        *(f"--ddpnb-h{hue}:{colour};" for hue, colour in enumerate(DARK)),
        "--ddpnb-good:#4cc27a;--ddpnb-wait:#f0b429;--ddpnb-bad:#ff6b6b;--ddpnb-off:#9aa0a6;--ddpnb-slow:#ffab5e;",
        "--ddpnb-page:#111;--ddpnb-ink-0:#f0f0f0;--ddpnb-soft-0:#a8a8a8;--ddpnb-line-0:#333;",
    ]
)
_LIGHT = "".join(
    [
        *(f"--ddpnb-h{hue}:{colour};" for hue, colour in enumerate(LIGHT)),
        "--ddpnb-good:#2e9e57;--ddpnb-wait:#d9920a;--ddpnb-bad:#d32f2f;--ddpnb-off:#8a8f98;--ddpnb-slow:#a85400;",
        "--ddpnb-page:#fff;--ddpnb-ink-0:#1f1f1f;--ddpnb-soft-0:#616161;--ddpnb-line-0:#e4e4e4;",
    ]
)

# The theme's own attribute decides; the system's wish counts only on a page that has neither JupyterLab's nor
# VS Code's mark.
_UNMARKED = "body:not([data-jp-theme-light]):not(.vscode-light):not(.vscode-high-contrast-light)"

_ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 20 20'%3E"
    "%3Cpath d='M6 8l4 4 4-4' fill='none' stroke='%23888' stroke-width='1.6'/%3E%3C/svg%3E\")"
)

_COLOURS = "".join(
    [
        ".ddpnb{" + _LIGHT + "}",
        '[data-jp-theme-light="false"] .ddpnb,body.vscode-dark .ddpnb,body.vscode-high-contrast .ddpnb{' + _DARK + "}",
        "@media(prefers-color-scheme:dark){" + _UNMARKED + " .ddpnb{" + _DARK + "}}",
        ".ddpnb{--ddpnb-ink:var(--jp-ui-font-color0,var(--ddpnb-ink-0));",
        "--ddpnb-soft:var(--jp-ui-font-color2,var(--ddpnb-soft-0));",
        "--ddpnb-line:var(--jp-border-color2,var(--ddpnb-line-0));",
        "--ddpnb-page-now:var(--jp-layout-color1,var(--ddpnb-page));",
        "--ddpnb-well:rgba(128,128,128,.13);--ddpnb-grid:rgba(128,128,128,.24);",
        # ipywidgets' own is black on dark pages too.
        f"--jp-widgets-dropdown-arrow:{_ARROW};",
        "--ddpnb-bar:var(--jp-brand-color1,#1976d2);--ddpnb-data:#e69f00;--ddpnb-compute:#56b4e9;--ddpnb-others:#999}",
    ]
)

# What is drawn is one widget, whose boxes are not there for the grid: its parts and the other widgets share the rows.
_GRID = "".join(
    [
        ".ddpnb.widget-vbox{display:grid;grid-template-columns:minmax(0,1fr) auto;column-gap:12px;align-items:center;",
        "box-sizing:border-box;max-width:780px;margin:4px 0;padding:12px 14px 14px;overflow:visible;",
        "border:1px solid var(--ddpnb-line);border-radius:6px;background:var(--ddpnb-page-now);color:var(--ddpnb-ink);",
        "font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums;",
        'grid-template-areas:"head buttons" "acts acts" "bar bar" "facts facts" "hung hung" "hands hands" ',
        '"tabs chooser" "tools tools" "body body" "foot foot"}',
        ".ddpnb>.ddpnb-live,.ddpnb>.ddpnb-live>.widget-html-content{display:contents}",
        ".ddpnb>.ddpnb-style{display:none}",
        ".ddpnb>.ddpnb-live>.widget-html-content{line-height:1.5}",
        *(
            f".ddpnb .{part}{{grid-area:{part};min-width:0}}"
            for part in ("head", "bar", "facts", "hung", "body", "foot")
        ),
        *(f".ddpnb>.ddpnb-{part}{{grid-area:{part}}}" for part in ("buttons", "hands", "tabs", "chooser", "tools")),
        ".ddpnb>.widget-box,.ddpnb>.jupyter-widgets{margin:0}",
        ".ddpnb.widget-vbox{container-type:inline-size}",
    ]
)

_DRAWN = "".join(
    [
        ".ddpnb b{font-weight:600;margin-right:9px;font-size:14px}",
        ".ddpnb .head{line-height:26px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}",
        ".ddpnb .dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:8px}",
        ".ddpnb .soft,.ddpnb .empty{color:var(--ddpnb-soft)}.ddpnb .soft{overflow-wrap:anywhere}",
        ".ddpnb .slow{color:var(--ddpnb-slow)}.ddpnb .bad-word{color:var(--ddpnb-bad)}",
        ".ddpnb .empty{padding:56px 0;text-align:center}",
        ".ddpnb .bar{height:6px;margin:7px 0 6px;border-radius:3px;background:var(--ddpnb-well);overflow:hidden}",
        ".ddpnb .bar div{height:100%;border-radius:3px}",
        ".ddpnb .unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}",
        ".ddpnb svg{margin:8px 0 6px}",
        ".ddpnb pre{margin:10px 0 0;padding:7px 10px;border-radius:4px;background:var(--ddpnb-well);",
        "color:var(--ddpnb-ink);font:12px/1.45 var(--jp-code-font-family,monospace);",
        "overflow:hidden;white-space:pre-wrap;overflow-wrap:anywhere;word-break:normal}",
        ".ddpnb pre.bad{border:1px solid var(--ddpnb-bad);background:none;max-height:340px;overflow:auto}",
        ".ddpnb .failure{margin:10px 0 0;padding:8px 12px 10px;border:1px solid var(--ddpnb-bad);border-radius:4px}",
        ".ddpnb .failure b{font-size:inherit}.ddpnb .failure pre{margin:4px 0;max-height:340px;overflow:auto}",
        ".ddpnb .hung b{font-size:inherit;margin:0}",
        *(f".ddpnb pre .h{hue}{{color:var(--ddpnb-h{hue})}}" for hue in range(len(LIGHT))),
        ".ddpnb .hung{margin:8px 0 4px;padding:8px 10px;border:1px solid var(--ddpnb-wait);border-radius:4px}",
        ".ddpnb .hung pre{background:none;padding:4px 0 0;margin:0;white-space:pre-wrap}",
        ".ddpnb summary{cursor:pointer}",
        ".ddpnb .scroll{overflow-x:auto}",
        ".ddpnb table.ranks{border-collapse:collapse;width:100%;margin:8px 0 2px;font-size:12px;table-layout:auto;",
        "border:none;color:var(--ddpnb-ink)}",
        ".ddpnb table.ranks :is(th,td){padding:2px 14px 2px 0;text-align:left;white-space:nowrap;background:none;",
        "border:none;font-weight:400;max-width:none}",
        ".ddpnb table.ranks thead :is(th){color:var(--ddpnb-soft)}",
        ".ddpnb table.ranks .figure{text-align:right}",
        ".ddpnb table.ranks tbody tr:is(:nth-child(odd),:nth-child(even),:hover){background:none}",
        ".ddpnb .bars{width:60%}.ddpnb .whole .bars{width:36%}",
        # In two lines if need be: or the key takes from the remarks what it needs in one, and they are cut off.
        ".ddpnb table.ranks thead .bars{white-space:normal}.ddpnb .bars>span{white-space:nowrap;margin-right:9px}",
        ".ddpnb .split{display:flex;height:9px;border-radius:2px;overflow:hidden;background:var(--ddpnb-well)}",
        ".ddpnb .data{background:var(--ddpnb-data)}.ddpnb .compute{background:var(--ddpnb-compute)}",
        ".ddpnb .wait{background:var(--ddpnb-others)}",
        ".ddpnb .key{display:inline-block;width:9px;height:9px;margin-right:5px}",
        ".ddpnb .swatch{display:inline-block;width:10px;height:4px;margin-right:7px;vertical-align:middle}",
    ]
)

# Which of the widgets are there is said by classes of the card: one message, and none has to be made anew.
_SHOWN = "".join(
    [
        ".ddpnb:not(.is-live) .ddpnb-live-only,.ddpnb:not(.is-hung)>.ddpnb-hands{display:none}",
        ".ddpnb:not(.is-live) .head{grid-column:1/-1}",
        ".ddpnb:not(.on-curves)>.ddpnb-chooser,.ddpnb:not(.on-output)>.ddpnb-tools.for-output,",
        ".ddpnb:not(.on-settings)>.ddpnb-tools.for-settings{display:none}",
        ".ddpnb:has(>.ddpnb-live .empty)>.ddpnb-chooser{visibility:hidden}",  # nothing is logged
    ]
)

_WIDGETS = "".join(
    [
        ".ddpnb .jupyter-button{width:auto;min-width:0;height:26px;line-height:24px;margin:0 0 0 8px;padding:0 13px;",
        "border:1px solid var(--ddpnb-line);border-radius:4px;background:var(--ddpnb-well);color:var(--ddpnb-ink);",
        "box-shadow:none;font-size:13px;opacity:1}",
        ".ddpnb .jupyter-button:hover:enabled{border-color:var(--ddpnb-soft)}",
        ".ddpnb .jupyter-button:disabled{color:var(--ddpnb-soft);background:none;cursor:default;opacity:.75}",
        ".ddpnb :is(button,select,input,a,summary):focus-visible{outline:2px solid var(--ddpnb-bar);",
        "outline-offset:1px}",
        ".ddpnb .ddpnb-tabs{border-bottom:1px solid var(--ddpnb-line);align-self:end}",
        ".ddpnb>.ddpnb-tabs,.ddpnb>.ddpnb-chooser{height:34px}",
        ".ddpnb>.ddpnb-tabs{grid-column:1/-1;grid-row:tabs}",
        ".ddpnb .ddpnb-tabs .widget-toggle-button{margin:0 16px 0 0;padding:0;height:33px;line-height:30px;border:0;",
        "border-bottom:2px solid transparent;border-radius:0;background:none;color:var(--ddpnb-soft)}",
        ".ddpnb .ddpnb-tabs .widget-toggle-button.mod-active{border-bottom-color:var(--ddpnb-bar);",
        "color:var(--ddpnb-ink)}",
        ".ddpnb>.ddpnb-buttons{justify-content:flex-end}",
        ".ddpnb>.ddpnb-hands .jupyter-button:first-child{margin-left:0}",
        # Across both columns: or its width would be taken from the head.
        ".ddpnb>.ddpnb-chooser{grid-column:1/-1;grid-row:tabs;justify-self:end;z-index:1}",
        ".ddpnb .widget-dropdown{width:auto;margin:0 0 0 6px}",
        ".ddpnb .ddpnb-chooser .widget-dropdown>select{border:0;background-color:transparent;color:var(--ddpnb-soft);",
        "flex:none;width:auto;max-width:130px;height:26px;padding:0 20px 0 4px;font-size:13px}",
        ".ddpnb .ddpnb-chooser .widget-dropdown>select option{background:var(--ddpnb-page-now);color:var(--ddpnb-ink)}",
        ".ddpnb>.ddpnb-tools{margin:8px 0 4px;flex-wrap:wrap;gap:6px}",
        ".ddpnb .for-output{align-items:center}.ddpnb .for-output>*{margin:0}",
        ".ddpnb .for-output .widget-text{width:220px}.ddpnb .for-output a{color:var(--ddpnb-bar)}",
    ]
)

# After all others, which they take back.
_NARROW = "".join(
    [
        # The chooser has a row of its own: that of the tools, which other tabs have.
        "@container(max-width:600px){.ddpnb>.ddpnb-chooser{grid-area:tools;justify-self:start;flex-wrap:wrap;",
        "height:auto}.ddpnb .head{white-space:normal}}",
        # As narrow as a phone, the buttons have one too, and the curve is moved under a window.
        "@container(max-width:420px){.ddpnb .head{grid-column:1/-1}",
        ".ddpnb>.ddpnb-buttons{grid-area:acts;justify-self:start;margin:0 0 4px -8px}",
        ".ddpnb .ddpnb-tabs .widget-toggle-button{margin-right:10px}",
        ".ddpnb .body{overflow-x:auto}.ddpnb svg{min-width:480px}}",
    ]
)

STYLE = f"<style>{_COLOURS}{_GRID}{_DRAWN}{_SHOWN}{_WIDGETS}{SVG_STYLE}{_NARROW}</style>"
"""The element that a card has once."""
