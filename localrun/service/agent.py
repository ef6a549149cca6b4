"""The launchd agent of a plan. Pure: one property list for one plan."""

from __future__ import annotations

import plistlib

from localrun.service.plan import ServicePlan

LABEL = "localrun.daemon"
_UMASK = 0o077


def agent(plan: ServicePlan) -> bytes:
    """The property list, as XML."""
    content = {
        "Label": LABEL,
        "ProgramArguments": list(plan.command),
        "EnvironmentVariables": dict(sorted(plan.environment.items())),
        "RunAtLoad": True,
        # Again after a crash, not after an orderly end.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 30,
        # Otherwise macOS slows the engines down as background work.
        "ProcessType": "Interactive",
        "Umask": _UMASK,
        "StandardOutPath": str(plan.log),
        "StandardErrorPath": str(plan.log),
    }
    return plistlib.dumps(content, sort_keys=True)
