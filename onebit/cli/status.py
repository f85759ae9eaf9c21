"""`onebit status`: what a run whose members come and go does now, as tables, as a page or as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from ..comm.transports.hanging import call_within
from ..membership import MembershipError
from ..membership.network import TOKEN, parse_address, reach
from ..membership.published import Epoch, Member, Onlooker, Status
from . import UserError
from .output import Screen, Table, write_json, write_whole
from .run import address, read_token

_ABOUT = """\
Shows a run from its rendezvous: members, how fast they are and when they were last heard of, newcomers that wait,
and what has changed. It writes nothing there. Entries that are not signed with the run's token are listed, and not
believed.
"""

READ_S = 30.0
"""How long a look may take before the rendezvous counts as hanging."""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="onebit status", description=_ABOUT)
    add = parser.add_argument
    add("address", type=address, metavar="HOST:PORT", help="address of the run's `onebit rendezvous`")
    add("--token-file", type=Path, metavar="FILE", help=f"read the run's secret from FILE (default: {TOKEN}, or none)")
    add("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS", help="look again, until Ctrl+C, SECONDS after "
        "the last look (default: 2)")  # fmt: skip
    add("--html", type=Path, metavar="FILE", help="write a page to FILE, which needs no other file")
    add("--json", type=Path, metavar="FILE", help="write the values to FILE; - is standard output, without tables")
    args = parser.parse_args(argv)
    if args.watch is not None and not 0.1 <= args.watch <= 86400:
        parser.error(f"--watch: expected 0.1 to 86400 seconds, got {args.watch:g}")
    return args


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    screen = Screen(is_quiet=str(args.json) == "-")
    onlooker = Onlooker(read_token(args.token_file) or "")
    status = _look(onlooker, args.address)
    _show(screen, args, status)
    while args.watch is not None:
        time.sleep(args.watch)
        try:
            status = _look(onlooker, args.address)
        except UserError as error:  # members survive that it is away
            print(f"{_clock(time.time())}: {error}", file=sys.stderr)
            continue
        if sys.stdout.isatty() and not screen.is_quiet:
            print("\033[H\033[2J", end="")
        _show(screen, args, status)
    if status.strangers and not (status.epochs or status.waiting or status.ended):
        raise UserError(f"no entry is signed with this token: give the run's by --token-file FILE, or in {TOKEN}")
    return 0


def _look(onlooker: Onlooker, where: str) -> Status:
    host, port = parse_address(where)
    try:
        store = reach(host, port)
        return call_within(READ_S, lambda: onlooker.look(store), port)
    except MembershipError as error:
        raise UserError(str(error)) from error
    except (RuntimeError, TimeoutError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"the rendezvous at {where} does not answer: {why}; is it `onebit rendezvous`?") from error


def _show(screen: Screen, args: argparse.Namespace, status: Status) -> None:
    screen.line(headline(args.address, status))
    for table in tables(status):
        screen.table(table)
    write_json(args.json, {"address": args.address, **asdict(status)})
    if args.html is not None:
        shown = page(args.address, status, args.watch)
        write_whole("--html", args.html, lambda part: part.write_text(shown, encoding="utf-8"))


# ---------------------------------------------------------------- words


def headline(where: str, status: Status) -> str:
    """The run in a sentence or two."""
    if status.is_empty:
        return f"{where}: no member has come to this rendezvous yet"
    if status.ended is not None:
        return f"{where}: the run has ended at {_clock(status.ended_at)}: {status.ended}"
    if not (status.epochs or status.waiting):
        return f"{where}: no entry here is signed with this token"
    if not status.epochs:
        of = "" if status.founders is None else f" of {status.founders}"
        return f"{where}: not begun: {len(status.waiting)}{of} founders have come"
    epoch = status.epochs[-1]
    steps = max((member.steps for member in status.members if member.steps is not None), default=None)
    parts = [f"{where}: epoch {epoch.number} of {_members(len(epoch.names))}"]
    parts[0] += "" if epoch.at is None else f" since {_clock(epoch.at)} ({_span(status.at - epoch.at)})"
    parts += [] if steps is None else [f"{steps} steps taken"]
    parts += [f"{len(status.waiting)} waiting to be let in"] if status.waiting else []
    if status.returning or not epoch.has_begun:
        parts.append("the members change now")
    return "; ".join(parts)


def tables(status: Status) -> list[Table]:
    """What there is to show: members, newcomers, epochs, entries without signature."""
    found = []
    headings = "member", "host", "state", "steps", "last step", "s/step", "of it waiting", "steps/s"
    if status.members:
        rows = [_member_row(member, status) for member in status.members]
        found.append(Table("members", headings, rows, words=3))
    if status.waiting:
        rows = [[member.name, member.host or "?", _state(member, status)] for member in status.waiting]
        found.append(Table("wait for the next epoch", headings[:3], rows, words=3))
    if status.epochs:
        rows = [_epoch_row(epoch) for epoch in reversed(status.epochs)]
        of_epochs = "epoch", "since", "lost", "joined", "members", "first step", "change took s"
        found.append(Table("epochs, the newest first", of_epochs, rows, words=4))
    if status.strangers:
        rows = [[stranger.key, stranger.why, stranger.text] for stranger in status.strangers]
        found.append(Table("not believed: unsigned entries", ("key", "why", "begins"), rows, words=3))
    return found


def _member_row(member: Member, status: Status) -> list[str]:
    idle_s = None if member.idle_s is None or member.silent_s is None else member.idle_s + member.silent_s
    return [
        member.name,
        member.host or "?",
        _state(member, status),
        "-" if member.steps is None else f"{member.steps}",
        "-" if idle_s is None else f"{_span(idle_s)} ago",
        "-" if member.step_s is None else f"{member.step_s:.3g}",
        "-" if member.waits_s is None else f"{member.waits_s:.3g}",
        "-" if not member.step_s else f"{1 / member.step_s:.3g}",
    ]


def _state(member: Member, status: Status) -> str:
    if status.ended is not None:
        return "left"
    if member.silent_s is None:
        return "no signed sign of life"
    if member.copied is not None and member.is_alive:
        return f"copies the state: {member.copied:.0%}"
    return "alive" if member.is_alive else f"silent for {_span(member.silent_s)}"


def _epoch_row(epoch: Epoch) -> list[str]:
    unknown = "?" if epoch.lost is None else ""
    return [
        f"{epoch.number}",
        _clock(epoch.at) if epoch.has_begun else "not begun",
        _names(epoch.lost) + unknown,
        _names(epoch.joined) + unknown,
        f"{len(epoch.names)}",
        "-" if epoch.step is None else f"{epoch.step}",
        "-" if epoch.seconds is None else f"{epoch.seconds:.2f}",
    ]


def _names(names: Sequence[str] | None, most: int = 3) -> str:
    """These names, or how many there are."""
    shown = names or ()
    return ", ".join(shown) if len(shown) <= most else f"{', '.join(shown[:most])} and {len(shown) - most} more"


def _members(count: int) -> str:
    return f"{count} member{'s' * (count != 1)}"


def _clock(at: float | None) -> str:
    """Local time; with the date if it is another day's."""
    if at is None:
        return "?"
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", then)


def _span(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------- a page

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60646c; --line: #d9d9e0; --back: #fff; --alive: #18794e;
  --gone: #ce2c31; --new: #0d74ce; --work: #0d74ce; --wait: #b9bbc6; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --dim: #b0b4ba; --line: #363a3f; --back: #111113;
  --alive: #3dd68c; --gone: #ff9592; --new: #70b8ff; --work: #70b8ff; --wait: #5a6169; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto;
  padding: 1rem; max-width: 62rem; }
h1 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; } .dim { color: var(--dim); font-size: .87rem; }
.row { border-top: 1px solid var(--line); padding: .5rem 0; }
.row p { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-variant-numeric: tabular-nums; }
.name { font-weight: 600; } .alive { color: var(--alive); } .gone { color: var(--gone); } .new { color: var(--new); }
svg { display: block; width: 100%; height: 12px; background: var(--line); border-radius: 3px; }
.work { fill: var(--work); } .wait { fill: var(--wait); } .here { fill: var(--alive); } .cut { fill: var(--gone); }
.axis { display: flex; justify-content: space-between; }
i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }
"""


def page(where: str, status: Status, again_s: float | None = None) -> str:
    """The run as a page in one file. Whatever comes from the store is escaped.

    Args:
        where: Address of the rendezvous.
        status: The run.
        again_s: Seconds after which a browser loads the page again. Default None: never.
    """
    title = f"onebit: {where}"
    refresh = "" if again_s is None else f'<meta http-equiv="refresh" content="{max(1, round(again_s))}">'
    body = [f"<h1>{escape(headline(where, status))}</h1>", f'<p class="dim">as of {_clock(status.at)}</p>']
    if status.members:
        body += ["<h2>Members</h2>", *_speeds(status)]
    if status.waiting:
        body += ["<h2>Waiting to be let in</h2>"]
        body += [_row(member.name, [("", member.host), _colored_state(member, status)]) for member in status.waiting]
    if status.epochs:
        body += ["<h2>Who was there when</h2>", *_time_line(status)]
        body += ["<h2>Epochs</h2>", *map(_epoch_item, reversed(status.epochs))]
    if status.strangers:
        body += ["<h2>Not believed: unsigned entries</h2>"]
        body += [_row(its.key, [("gone", its.why)], _paragraph(its.text)) for its in status.strangers]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{refresh}<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    lines = ["<!DOCTYPE html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>"]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Sequence[tuple[str, str]], below: str = "") -> str:
    """A name, and texts with the class of each. below: HTML."""
    shown = "".join(f'<span class="{kind}">{escape(text)}</span>' for kind, text in cells if text)
    return f'<div class="row"><p><span class="name">{escape(name)}</span>{shown}</p>{below}</div>'


def _paragraph(text: str) -> str:
    return f'<p class="dim">{escape(text)}</p>'


def _colored_state(member: Member, status: Status) -> tuple[str, str]:
    return "alive" if member.is_alive and status.ended is None else "gone", _state(member, status)


def _speeds(status: Status) -> list[str]:
    """A bar for each member: seconds of a step, and how many of them it waits for others."""
    slowest = max((member.step_s or 0.0 for member in status.members), default=0.0)
    rows = []
    for member in status.members:
        bar = ""
        cells = [("", member.host), _colored_state(member, status)]
        cells += [] if member.steps is None else [("", f"{member.steps} steps")]
        if member.step_s:
            waits_s = min(member.waits_s or 0.0, member.step_s)
            cells.append(("", f"{member.step_s:.3g} s a step, {waits_s:.3g} s of it waiting"))
            work, whole = 100 * (member.step_s - waits_s) / slowest, 100 * member.step_s / slowest
            bar = _bars([("work", 0.0, work, "computing"), ("wait", work, whole, "waiting for others")])
        rows.append(_row(member.name, cells, bar))
    legend = (
        '<p class="dim"><i style="background:var(--work)"></i>computing &ensp;'
        '<i style="background:var(--wait)"></i>waiting for others, seconds of a step</p>'
    )
    return [legend, *rows] if slowest else rows


def _time_line(status: Status) -> list[str]:
    """A row for each name: the epochs in which it was a member."""
    begun = [(epoch, epoch.at) for epoch in status.epochs if epoch.at is not None]
    if not begun:
        return ['<p class="dim">No epoch has begun yet.</p>']
    first = min(at for _, at in begun)
    last = max(status.at if status.ended_at is None else status.ended_at, max(at for _, at in begun), first + 1.0)
    ends = [at for _, at in begun[1:]] + [last]
    rows = []

    def place(at: float) -> float:
        return 100 * (at - first) / (last - first)

    for name in dict.fromkeys(name for epoch, _ in begun for name in epoch.names):
        bars, seconds = list[tuple[str, float, float, str]](), 0.0
        for (epoch, at), end in zip(begun, ends, strict=True):
            if name in epoch.names:
                bars.append(("here", place(at), place(end), f"epoch {epoch.number}"))
                seconds += max(end - at, 0.0)
            if name in (epoch.lost or ()):
                left = place(at)
                bars.append(("cut", left, left + 0.8, f"lost before epoch {epoch.number}"))
        rows.append(_row(name, [("dim", _span(seconds))], _bars(bars)))
    axis = f'<p class="dim axis"><span>{_clock(first)}</span><span>{_clock(last)}</span></p>'
    legend = (
        '<p class="dim"><i style="background:var(--alive)"></i>a member &ensp;'
        '<i style="background:var(--gone)"></i>lost</p>'
    )
    return [legend, *rows, axis]


def _bars(bars: Sequence[tuple[str, float, float, str]]) -> str:
    """Class, left and right end in percent, and what it is. Stretched to any width; its words are outside."""
    drawn = "".join(
        f'<rect class="{kind}" x="{left:.2f}" y="0" width="{max(right - left, 0.3):.2f}" height="10">'
        f"<title>{escape(what)}</title></rect>"
        for kind, left, right, what in bars
    )
    return f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img">{drawn}</svg>'


def _epoch_item(epoch: Epoch) -> str:
    cells = [("", _clock(epoch.at) if epoch.has_begun else "not begun"), ("", _members(len(epoch.names)))]
    cells += [] if epoch.step is None else [("", f"from step {epoch.step}")]
    cells += [] if epoch.seconds is None else [("", f"the change took {epoch.seconds:.2f} s")]
    cells += [("gone", f"lost: {', '.join(epoch.lost)}")] if epoch.lost else []
    cells += [("new", f"joined: {', '.join(epoch.joined)}")] if epoch.joined else []
    return _row(f"{epoch.number}", cells, _paragraph(epoch.why) if epoch.why else "")
