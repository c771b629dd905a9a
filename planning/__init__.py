"""Planning: signatures, the support table, engine choice, plans and the plan store."""

from ..errors import PlanMissError
from .plan import Plan
from .process_store import default_store, store_or_default
from .ranking import choose
from .signature import Signature, register_signature
from .store import PlanStore, StoreStats
from .support import ENGINES, REQUIREMENTS, Verdict, verdict

__all__ = ["ENGINES", "REQUIREMENTS", "Plan", "PlanMissError", "PlanStore", "Signature", "StoreStats", "Verdict", "choose", "default_store",
           "register_signature", "store_or_default", "verdict"]
