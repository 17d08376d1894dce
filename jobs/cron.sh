#!/bin/bash
# FOLDER/NAME.log gets all words of a nightly run; cron, which mails whatever is printed, gets them only when a person
# must look:  30 1 * * * /srv/fluxbatch/jobs/cron.sh /srv/catalogue nightly --config-dir conf job=nightly
# PYTHON is that of the checkout this script lies in, unless it is set in the crontab (PYTHON=/opt/venv/bin/python).
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}
cd "$1" || exit 1
log=$PWD/$2.log
shift 2

if [ -f "$log" ] && [ "$(wc -c < "$log")" -gt 1000000 ]; then mv -f "$log" "$log.1"; fi   # two logs, 1 MB each or so
began=$(wc -c 2>/dev/null < "$log" || echo 0)
echo "$(date -u +%FT%TZ) start" >> "$log"
"$PYTHON" -m fluxbatch "$@" >> "$log" 2>&1
rc=$?
echo "$(date -u +%FT%TZ) exit $rc" >> "$log"
# 0: done. 6: the run of last night is still at it. 75: stopped in order, for a restart of the machine say.
case $rc in
  0|6|75) ;;
  *) tail -c +"$((began + 1))" "$log" | tail -n 30;;
esac
exit "$rc"
