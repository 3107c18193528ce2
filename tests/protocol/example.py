"""Records and messages for tests: each field that a test does not name has a plain value."""

from bloomery.data.position import Position
from bloomery.protocol.hello import ConnectionHello
from bloomery.protocol.rank_messages import StateHeld
from bloomery.protocol.records import Attempt, Commit, Failed, Member, Ready, RecoveryRecord


def member(**fields) -> Member:
    usual = dict(peer="a", incarnation="1", addresses=(), serves=(), round=-1, digest="", ranks=1, recipe="r")
    usual |= dict(samples=4, relays=False, epoch=0, overtaken=0, backed_up=None, saves=())
    return Member(**usual | fields)


def ready(**fields) -> Ready:
    usual = dict(
        peer="a", round=1, steps=1, tokens=8, spent=(range(8),), norm=1.0, finite=True, wants_save=False
    )
    usual |= dict(rewind_to=None, kept=(), skip=(), why="", step_s=0.0)
    return Ready(**usual | fields)


def attempt(**fields) -> Attempt:
    return Attempt(**dict(round=1, epoch=1, members=("a",), weights=(1.0,), left_out={}) | fields)


def failed(**fields) -> Failed:
    return Failed(**dict(peer="a", round=1, epoch=1, kind="stalled", culprit=None, why="") | fields)


def commit(**fields) -> Commit:
    usual = dict(
        round=1, epoch=1, members=("a",), digest="d", position=Position(), sources=("a",), left_out={}
    )
    return Commit(**usual | dict(rewind_to=None, save=False, why="") | fields)


def recovery_record(**fields) -> RecoveryRecord:
    return RecoveryRecord(**dict(epoch=0, commit=None, shares=None, held=None) | fields)


def state_held(**fields) -> StateHeld:
    usual = dict(round=1, digest="d", step=3, samples=4, position=None, saves=())
    return StateHeld(**usual | fields)


def connection_hello(**fields) -> ConnectionHello:
    usual = dict(run="r", peer="a", incarnation="a1", target="b", target_incarnation="b1", purpose="ring")
    usual |= dict(rank=0, stream=0, sends=False, encrypt=False, circuit="", nonce="11" * 32)
    return ConnectionHello(**usual | fields)
