from tests.stubs import stale_stubs


def test_generated_stubs_are_current() -> None:
    assert stale_stubs() == []
