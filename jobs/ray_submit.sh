#!/bin/bash
# RAY_ADDRESS=http://head:8265 bash jobs/ray_submit.sh job=nightly ...: hands the job to a running Ray cluster, follows
# its log and ends with the exit code of fluxbatch, where `ray job submit` knows only 0 and 1.
# Paths are those of the cluster's nodes. On the head: RAY_JOB_STOP_WAIT_TIME_S above run.grace_s.
id="fluxbatch-$(date -u +%Y%m%dT%H%M%SZ)-$$"   # Ray takes a submission id once

trap 'ray job stop --no-wait "$id"' TERM INT USR1   # the driver gets SIGTERM: it drains, and we follow it to its end
ray job submit --submission-id "$id" -- python -m fluxbatch "$@" run.engine=ray & follower=$!
rc=0; wait "$follower" || rc=$?
while kill -0 "$follower" 2>/dev/null; do rc=0; wait "$follower" || rc=$?; done   # a trap interrupts wait

code="$(python - "$id" <<'PYTHON'
import sys

from ray.job_submission import JobSubmissionClient

try:
    code = JobSubmissionClient().get_job_info(sys.argv[1]).driver_exit_code
except RuntimeError:  # it was never taken: what `ray job submit` said stands
    code = None
print("" if code is None else code if code >= 0 else 128 - code)
PYTHON
)"
exit "${code:-$rc}"
