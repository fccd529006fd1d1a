#!/usr/bin/env bash
# Makes a release: version, changelog, wheel and checksum. It stops before the upload and names the commands for it.
#
# Usage: scripts/release.sh VERSION      such as 0.1.0; CHANGELOG.md has "## [VERSION] - unreleased"
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
expect_options "" "$@"
[ $# -eq 1 ] || refuse "$# arguments; it takes a version"
version=$1
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "VERSION is '$version'; it must be three numbers, such as 0.1.0"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "$(git status --porcelain)" ] || refuse "the working tree has changes; commit them first"
grep -qF "## [$version] - unreleased" CHANGELOG.md ||
  refuse "CHANGELOG.md has no '## [$version] - unreleased'; write what is new under that line first"
source scripts/environment.sh
choose_python dev

today=$(date +%Y-%m-%d)
sed -i "s/^## \[$version\] - unreleased$/## [$version] - $today/" CHANGELOG.md
sed -i "s/^version = \".*\"$/version = \"$version\"/" pyproject.toml
sed -i "s/^version: .*/version: $version/" CITATION.cff
rm -rf dist
"$python" -m hatchling build -t wheel -d dist
(cd dist && sha256sum -- *.whl | tee SHA256SUMS)
cat <<END

dist/ has the wheel and its checksum. Nothing was committed or sent. What is left:
  git commit -am "Release $version" && git tag v$version && git push --follow-tags
  $python -m twine upload dist/*.whl
END
