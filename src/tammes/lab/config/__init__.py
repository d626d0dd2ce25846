"""Configuration of runs; losses, heads and networks are text, parsed without ``eval``."""

from tammes.lab.config.expressions import Call, build, normal, parse_call, parse_calls, split_list
from tammes.lab.config.head_expressions import HEADS, head_text, parse_head
from tammes.lab.config.loss_expressions import SCHEDULES, TERMS, parse_loss, parse_schedules

__all__ = [
    "HEADS",
    "SCHEDULES",
    "TERMS",
    "Call",
    "build",
    "head_text",
    "normal",
    "parse_call",
    "parse_calls",
    "parse_head",
    "parse_loss",
    "parse_schedules",
    "split_list",
]
