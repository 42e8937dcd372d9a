#!/usr/bin/env bash
# Save the first and the last layer's outputs of many modes, in one process:
#
#   ./save_all_modes.sh                   fp32 and all quantised modes
#   ./save_all_modes.sh fp_only           fp32 alone
#   ./save_all_modes.sh quant_only        the quantised modes alone
#   ./save_all_modes.sh essential         fp32, 0, 2-1, 2-2, 2-4
#   ./save_all_modes.sh fp32 0 2-1 2-4    these modes
#
# Options of save_layer_outputs.py may follow: ./save_all_modes.sh essential --layers all
# Exit code: 0 saved, 2 trouble; a mode that fails does not stop the others.

MODEL="quamba-130m-w8a8"                                     # the model's name
PRETRAINED_DIR="pretrained_models/Quamba1-pa9999/pa-0.9999"  # its weights
OUTPUT_DIR="layer_outputs"                                   # where the files go
CALIB_DATA_NUM=10                                            # samples
CALIB_SEQLEN=512                                             # tokens a sample

case "$1" in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
modes=()
while (($#)) && [[ $1 != --* ]]; do
    modes+=("$1")
    shift
done
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/save_layer_outputs.py" "$MODEL" \
    --pretrained_dir "$PRETRAINED_DIR" \
    --mode "${modes[@]:-all}" \
    --output_dir "$OUTPUT_DIR" \
    --calib_data_num "$CALIB_DATA_NUM" \
    --calib_seqlen "$CALIB_SEQLEN" "$@"
