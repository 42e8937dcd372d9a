#!/usr/bin/env bash
# Record, compare and summarise all modes, or those that are named:
#
#   ./QUICK_RUN.sh [all|essential|modes…] [options of save_layer_outputs.py]
#
# Exit code: 0 done, 2 trouble; a mode that fails does not stop the others.

case "$1" in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
here="$(dirname "${BASH_SOURCE[0]}")"
"$here/save_all_modes.sh" "$@"
saved=$?
where=()
while (($#)); do
    [[ $1 == --output_dir ]] && where=(--output_dir "$2")
    shift
done
"$here/compare_all_modes.sh" "${where[@]}"
compared=$?
((saved == 0)) || exit "$saved"
exit "$compared"
