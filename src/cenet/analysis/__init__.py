"""Measurements of the channels of a network."""

from cenet.analysis.ablation import channel_importance, cumulative_ablation
from cenet.analysis.channels import (
    bias_statistics,
    channel_correlation,
    channel_magnitude,
    contribution,
    correlation_matrix,
    decorrelation_spectrum,
    duplicates,
    equivalent_gamma,
    first_layers_ratio,
    gini,
    group_correlation,
    inhibited_ratio,
    mixing_ratio,
    participation_ratio,
    relative_activity,
    saturated,
    weight_statistics,
)
from cenet.analysis.diagnose import diagnose
from cenet.analysis.diagnosis import Diagnosis
from cenet.analysis.gradcam import gradcam
from cenet.analysis.monitor import Monitor
from cenet.analysis.recorder import Recorder

__all__ = [
    "Diagnosis",
    "Monitor",
    "Recorder",
    "bias_statistics",
    "channel_correlation",
    "channel_importance",
    "channel_magnitude",
    "contribution",
    "correlation_matrix",
    "cumulative_ablation",
    "decorrelation_spectrum",
    "diagnose",
    "duplicates",
    "equivalent_gamma",
    "first_layers_ratio",
    "gini",
    "gradcam",
    "group_correlation",
    "inhibited_ratio",
    "mixing_ratio",
    "participation_ratio",
    "relative_activity",
    "saturated",
    "weight_statistics",
]
