# Fails if a field of a dashboard is not in Grafana's schema: the schema's types lose it.
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

def differences(ours, kept, path):
    if isinstance(ours, dict) and isinstance(kept, dict):
        for key in ours:
            yield from differences(ours[key], kept.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        for i, pair in enumerate(zip(ours, kept)):
            yield from differences(*pair, f"{path}/{i}")
    elif ours != kept:
        yield path

register_default_plugins()
dashboard = json.load(open(sys.argv[1]))
kept = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
if unknown := list(differences(dashboard, kept, "")):
    sys.exit("not in Grafana's schema: " + " ".join(unknown))
