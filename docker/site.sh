#!/bin/sh
# Makes this site's home, once: of the swarm whose manifest lies in /etc/sapo, else of a new one of $PRESET.
set -eu
if [ -f "$SAPO_HOME/manifest.json" ]; then
    echo "the home of site $SITE is there"
    exit 0
fi
begun=$(mktemp -d)
manifest=/etc/sapo/$SWARM.manifest.json
if [ ! -f "$manifest" ]; then
    sapo init --swarm "$SWARM" --site "$SITE" --nodes "$NODES" --preset "$PRESET" \
        --set rules.entry=open --dir "$begun/new"  # who reaches this broker may join
    manifest=$begun/new/$SWARM.manifest.json
fi
sapo join "$manifest" --site "$SITE" --nodes "$NODES" --dir "$begun/site" --home "$SAPO_HOME"
