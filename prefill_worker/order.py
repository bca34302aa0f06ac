"""Moved to pdserve/engine/order.py: the decode worker computes prompts in the same order."""

from pdserve.engine.order import RESERVE as RESERVE
from pdserve.engine.order import Shares as Shares
from pdserve.engine.order import Turns as Turns
from pdserve.engine.order import delay_bound as delay_bound
from pdserve.engine.order import share_out as share_out
