"""The plan of the chaos proxy, as one word of a command line."""

from __future__ import annotations

import dataclasses
import json

from chaos_proxy import Incident, Plan


def plan_of(text: str) -> Plan:
    """Reads a plan from JSON, where the incident is a list."""
    fields = json.loads(text)
    incident = fields.pop("incident", None)
    return Plan(**fields, incident=None if incident is None else Incident(*incident))


def text_of(plan: Plan) -> str:
    """Writes a plan so that `plan_of` reads it."""
    incident = None if plan.incident is None else dataclasses.astuple(plan.incident)
    return json.dumps({**dataclasses.asdict(plan), "incident": incident})
