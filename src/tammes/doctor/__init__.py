"""Diagnosis of a training run: what is wrong, why, and what to change."""

from tammes.doctor.diagnose import NAMES, Diagnosis, check_muted, diagnose
from tammes.doctor.finding import Finding

__all__ = ["NAMES", "Diagnosis", "Finding", "check_muted", "diagnose"]
