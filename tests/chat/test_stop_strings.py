"""Stop strings in texts that arrive in pieces of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.chat.stop_strings import StopStringFilter


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scan = StopStringFilter(stops)
    text = "".join(scan.push(piece) for piece in pieces)
    return text + scan.finish(), scan.stopped


def test_a_stop_string_across_three_pieces_is_found_and_not_shown() -> None:
    assert shown(["</answer>"], ["4</an", "sw", "er> and more"]) == ("4", True)


def test_what_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    assert shown(["###"], ["a#", "#b", "##"]) == ("a##b##", False)


def test_text_is_held_back_only_while_it_could_become_a_stop_string() -> None:
    scan = StopStringFilter(["END"])
    assert scan.push("the E") == "the "
    assert scan.push("N") == ""
    assert scan.push("T") == "ENT"


def test_an_empty_stop_string_stops_nothing() -> None:
    assert shown([""], ["abc"]) == ("abc", False)


def test_a_stop_string_counts_by_where_it_ends() -> None:
    scan = StopStringFilter(["END", "N"])
    assert scan.push("END E", can_stop=False) == "END " and not scan.stopped
    # The short stop string ended, the long one has begun.
    assert scan.push("N", can_stop=False) == "" and not scan.stopped
    assert scan.push("D.") == "" and scan.stopped
    scan = StopStringFilter(["ab", "abc"])
    assert scan.push("ab", can_stop=False) + scan.push("d") + scan.finish() == "abd" and not scan.stopped


@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_division_into_pieces_makes_no_difference(pieces: list[str], stops: list[str]) -> None:
    """The result is the text before the stop string that ends first, however the text is cut into pieces."""
    whole = "".join(pieces)
    text, stopped = shown(stops, list(whole))
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    assert stopped == bool(ends)
    if ends:
        until = whole[: min(ends)]
        assert text == min((until[: until.find(stop)] for stop in stops if stop in until), key=len)
        assert shown(stops, pieces)[1]
    else:
        assert text == whole
        assert shown(stops, pieces) == (text, False)
