"""Where pages should be: policies take arrays of page figures and answer with a plan.

`registry.create` makes one by name.
"""

from .base import Budgets, PageStats, Plan, Policy, place
from .registry import create, names
from .validate import check_plan

__all__ = ["Budgets", "PageStats", "Plan", "Policy", "check_plan", "create", "names", "place"]
