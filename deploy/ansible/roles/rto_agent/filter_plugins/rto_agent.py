"""Filters of the role: the comparison of a policy's arms for tasks/gate.yml."""


def arms(after, before, least=1000, margin=0.001, deviations=4):
    """Compares the arms of each policy between two answers of `rto-agent stats --json`.

    Counts attempts of connections that the host opens. An attempt is bad if it was not established within 500 ms. A
    policy is judged once both arms have `least` attempts. Its timers do harm if the treated arm's share of bad attempts
    is larger than the control arm's by more than `margin`, and by more than `deviations` standard deviations of the
    difference, or if at least 20 and a hundredth of its connections had a spurious SYN or SYN-ACK. A verdict waits while its policy may still be judged later.
    """
    verdicts = []
    for policy, stats in sorted(after["policies"].items()):
        # Connections that no entry covers.
        if policy == "unmatched":
            continue
        earlier = before["policies"].get(policy) or {}
        spurious, connections = _spurious(stats, earlier)
        if spurious >= 20 and spurious > 0.01 * connections:
            text = "{}: {} of {} connections sent a SYN or SYN-ACK in vain: the timer is shorter than the path".format(
                policy, spurious, connections
            )
            verdicts.append({"policy": policy, "waits": False, "judged": True, "harm": True, "text": text})
            continue
        if stats.get("control") is None:
            text = "{}: no control arm to compare with (holdout)".format(policy)
            verdicts.append({"policy": policy, "waits": False, "judged": False, "harm": False, "text": text})
            continue
        treated = _counted(stats, earlier)
        control = _counted(stats["control"], earlier.get("control") or {})
        verdict = {"policy": policy, "treated": treated, "control": control}
        verdict["judged"] = min(treated["attempts"], control["attempts"]) >= max(least, 1)
        verdict["waits"] = not verdict["judged"]
        verdict["harm"] = verdict["judged"] and _is_harm(treated, control, margin, deviations)
        verdict["text"] = "{}: bad attempts: {} with the policy's timers, {} with the kernel's own{}".format(
            policy, _share(treated), _share(control), "" if verdict["judged"] else " (too few to judge)"
        )
        verdicts.append(verdict)
    return verdicts


def _counted(arm, earlier):
    now = arm["active"]
    then = earlier.get("active") or {}
    # A policy that was removed and created again counts from 0.
    if then.get("attempts", 0) > now["attempts"] or then.get("good_attempts", 0) > now["good_attempts"]:
        then = {}
    attempts = now["attempts"] - then.get("attempts", 0)
    good = now["good_attempts"] - then.get("good_attempts", 0)
    # Good attempts of connections that began before the first answer may exceed the attempts since then.
    return {"attempts": attempts, "bad": max(attempts - good, 0)}


def _spurious(stats, earlier):
    grown = {"spurious_connections": 0, "connections": 0}
    for direction in "active", "passive":
        now, then = stats[direction], earlier.get(direction) or {}
        for key in grown:
            grown[key] += max(now.get(key, 0) - then.get(key, 0), 0)
    return grown["spurious_connections"], grown["connections"]


def _is_harm(treated, control, margin, deviations):
    sizes = treated["attempts"], control["attempts"]
    difference = treated["bad"] / sizes[0] - control["bad"] / sizes[1]
    pooled = (treated["bad"] + control["bad"]) / sum(sizes)
    deviation = (pooled * (1 - pooled) * (1 / sizes[0] + 1 / sizes[1])) ** 0.5
    return difference > margin and difference > deviations * deviation


def _share(arm):
    attempts, bad = arm["attempts"], arm["bad"]
    return "{} of {} ({:.2f} %)".format(bad, attempts, 100 * bad / attempts if attempts else 0)


class FilterModule:
    def filters(self):
        return {"rto_agent_arms": arms}
