# For scripts of this folder, which source it: usage, and arguments that are told before anything starts.
# shellcheck shell=bash

# Where it is before anything changes the folder.
script=$(realpath "$0")

# Says how the script is used, in the words of its head, and ends with the given status.
usage() {
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$script" >&2
  exit "${1:-2}"
}

# Ends with what is wrong, and how it is right.
refuse() {
  echo "error: $1" >&2
  usage 2
}

# expect_options "--one --two" ARGUMENT ...: refuses options before -- that are not among these, and knows --help.
expect_options() {
  local known=${1:+" $1 "} argument
  shift
  for argument in "$@"; do
    case $argument in
      --) return ;;
      -h | --help) usage 0 ;;
      --?* | -[a-zA-Z]*)
        [[ $known == *" ${argument%%=*} "* ]] || refuse "$argument is no option; known:${known:- none}"
        ;;
    esac
  done
}

# expect_first -f|-d NAME ARGUMENT ...: refuses a missing first argument, or one that is no file or no folder.
expect_first() {
  local kind=$1 name=$2
  shift 2
  [ $# -gt 0 ] || refuse "$name is missing"
  case $1 in
    -*) refuse "$name is missing: it comes first, before $1" ;;
  esac
  case $kind in
    -f) [ -f "$1" ] || refuse "$name is '$1', which is no file" ;;
    -d) [ -d "$1" ] || refuse "$name is '$1', which is no folder" ;;
  esac
}
