#!/bin/bash
# Starts ranks by ssh, without a scheduler: examples/clusters/ssh.sh "node1 node2" train.py
# The first machine hosts the rendezvous server. Each machine needs gradsync, and the script at the same path. You may set
# RANKS_PER_NODE and PORT.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: $0 \"node1 node2\" train.py" >&2; exit 2; }
read -r -a hosts <<< "$1"
shift
ranks=${RANKS_PER_NODE:-4} port=${PORT:-29400} ssh=${SSH:-ssh}
secret=$(python3 -c 'import secrets; print(secrets.token_hex(32))')

# This script sends the secret by standard input, because all users of a machine can read command lines. Standard input
# stays open while this script runs. When this script ends, for example by Ctrl-C, the remote command ends the ranks.
# The remote command has no line breaks, so that every login shell can read it.
remote='f=$(mktemp) && trap "rm -f $f" EXIT && read -r s && echo "$s" > "$f" && cd "$1" && shift && exec 3<&0 || exit; '
remote+='GRADSYNC_SECRET_FILE=$f "$@" < /dev/null 3<&- & ranks=$!; '
remote+='{ while read -r s <&3; do :; done; kill $ranks; } > /dev/null 2>&1 & watch=$!; '
remote+='wait $ranks; c=$?; kill $watch 2> /dev/null; exit $c'
pids=()
for number in "${!hosts[@]}"; do
    command=(gradsync run -n "$ranks" --nnodes "${#hosts[@]}" --node-rank "$number" --rendezvous "${hosts[0]}:$port" "$@")
    $ssh "${hosts[$number]}" "$(printf '%q ' bash -c "$remote" gradsync "$PWD" "${command[@]}")" \
        < <(echo "$secret"; exec tail --pid=$$ -f /dev/null 2> /dev/null) &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
