"""The ledger of a training job's time: written by each process, merged across ranks and restarts (no torch import)."""

from torchwright.train.ledger.account import Account, read_account
from torchwright.train.ledger.buckets import BUCKETS, LedgerError
from torchwright.train.ledger.launcher import process_started, torchrun
from torchwright.train.ledger.write import Ledger

__all__ = ["BUCKETS", "Account", "Ledger", "LedgerError", "process_started", "read_account", "torchrun"]
