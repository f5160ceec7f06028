"""Checks the prepared answers against the schema of the API. Usage: schema.py SCHEMA DIRECTORY"""

import json
import pathlib
import sys

import jsonschema

schema = json.loads(pathlib.Path(sys.argv[1]).read_text())
answers = sorted(pathlib.Path(sys.argv[2]).glob("*.json"))
assert len(answers) > 3, answers
for answer in answers:
    kind = "StatusAnswer" if answer.name == "status.json" else "StatsAnswer"
    whole = {"$schema": schema["$schema"], "$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]}
    jsonschema.validate(json.loads(answer.read_text()), whole)
    # The schema does not know the fields that the gate reads.
    if kind == "StatsAnswer":
        known = schema["$defs"]["DirectionStats"]["properties"]
        assert {"attempts", "good_attempts"} <= known.keys()
    else:
        assert "healthy" in schema["$defs"][kind]["properties"]
