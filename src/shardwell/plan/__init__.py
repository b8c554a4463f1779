"""Plans: what a step of a model takes on a machine that need not exist, by the engine's own code on the meta device."""

from shardwell.memory.machine import SimulatedMachine, SimulatedRanks
from shardwell.plan.comparison import PlanComparison, compare
from shardwell.plan.estimate import estimate, tokens
from shardwell.plan.report import PlanReport
from shardwell.plan.simulation import BlockModel, StepCosts
from shardwell.plan.state_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shardwell.plan.step_time import ResourceTime, StepTime
from shardwell.virtual_time.speeds import MatmulRates, Speeds
from shardwell.virtual_time.virtual_clock import Task

__all__ = [
    "BlockModel",
    "MatmulRates",
    "PlanComparison",
    "PlanReport",
    "ResourceTime",
    "SimulatedMachine",
    "SimulatedRanks",
    "Speeds",
    "StepCosts",
    "StepTime",
    "Task",
    "compare",
    "estimate",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "tokens",
]
