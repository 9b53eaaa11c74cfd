{{/* Rules between values; those of one value are in values.schema.json. Each message ends with the fix. */}}
{{- define "latentray.rules" -}}
{{- $values := .Values -}}
{{- $config := $values.config -}}
{{- $server := $values.server -}}
{{- $batch := $values.batch -}}
{{- $name := include "latentray.fullname" . -}}
{{- $tp := include "latentray.tensorParallelSize" . | int -}}
{{- $needed := add $tp 1 | int -}}

{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "the release's name makes %q the RayCluster's, which must begin with a letter; set fullnameOverride" $name) -}}
{{- end -}}
{{- if not (or $server.enabled $batch.enabled) -}}
{{- fail "server.enabled and batch.enabled are both false, so there is nothing to install; set one of them" -}}
{{- end -}}

{{- if has (index $config "host") (list "127.0.0.1" "localhost" "::1") -}}
{{- fail (printf "config.host is %s, which no probe, Service or client reaches; use 0.0.0.0, or :: for IPv6" (index $config "host")) -}}
{{- end -}}
{{- range $key := list "api-keys" "tls-cert" "tls-key" "tls-client-ca" -}}
{{- if index $config $key -}}
{{- fail (printf "config.%s is a file of the pods, which come from Secrets; set access.apiKeysSecret and access.tlsSecret (certificates of clients end at a gateway: probes have none)" $key) -}}
{{- end -}}
{{- end -}}
{{- $access := $values.access -}}
{{- if and $server.enabled (not (index $config "insecure")) (not (and $access.apiKeysSecret $access.tlsSecret)) -}}
{{- fail "config.insecure is false, and then the server needs keys and TLS; set access.apiKeysSecret and access.tlsSecret, or config.insecure: true" -}}
{{- end -}}
{{- if and $access.tlsSecret (or $values.ingress.enabled $values.httpRoute.enabled $values.grpcRoute.enabled) -}}
{{- fail "access.tlsSecret makes the server speak TLS, and the Ingress and the routes of this chart end it themselves; leave access.tlsSecret out, or make routes of your own that pass TLS on" -}}
{{- end -}}
{{- $taken := dict "8080" "Ray's metrics" "6379" "Ray" "8265" "Ray's dashboard" "52365" "Ray's agent" -}}
{{- range $key := list "port" "http-port" "metrics-port" -}}
{{- if index $config $key -}}
{{- $port := index $config $key | int | toString -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "config.%s is %s, which %s has; use another port" $key $port (get $taken $port)) -}}
{{- end -}}
{{- $_ := set $taken $port (printf "config.%s" $key) -}}
{{- end -}}
{{- end -}}

{{- range $name, $_ := $values.env -}}
{{- if hasPrefix "LATENTRAY_" $name -}}
{{- fail (printf "env.%s would override the file of settings; write config.%s" $name (trimPrefix "LATENTRAY_" $name | lower | replace "_" "-")) -}}
{{- end -}}
{{- if has $name (list "HOME" "USER" "HF_TOKEN" "DRAIN_SECONDS" "STARTUP_SECONDS" "RAY_ADDRESS" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "RAY_USAGE_STATS_ENABLED" "KUBERAY_GEN_RAY_START_CMD") -}}
{{- fail (printf "env.%s is set by the chart or by KubeRay; leave it out" $name) -}}
{{- end -}}
{{- end -}}

{{- $model := index $config "model" -}}
{{- $inVolume := and $model (hasPrefix (printf "%s/" $values.model.mountPath) $model) -}}
{{- if and $inVolume (not $values.model.existingClaim) -}}
{{- fail (printf "config.model is %s, and nothing is mounted at model.mountPath %s; set model.existingClaim" $model $values.model.mountPath) -}}
{{- end -}}
{{- if and $values.model.existingClaim (not $inVolume) -}}
{{- fail (printf "model.existingClaim %s is mounted at %s, but config.model is %s; set config.model: %s/DIRECTORY" $values.model.existingClaim $values.model.mountPath ($model | default "the bundled model") $values.model.mountPath) -}}
{{- end -}}
{{- if $values.model.download.enabled -}}
{{- if or (not $values.model.existingClaim) (not $values.model.download.repository) (not $values.model.download.directory) -}}
{{- fail "model.download needs a volume, a repository and a directory in it; set model.existingClaim, model.download.repository and model.download.directory" -}}
{{- end -}}
{{- $into := printf "%s/%s" $values.model.mountPath $values.model.download.directory -}}
{{- if ne $into $model -}}
{{- fail (printf "model.download puts the model into %s, but config.model is %s; make them the same" $into $model) -}}
{{- end -}}
{{- end -}}

{{- if $server.enabled -}}
{{- $device := index $config "device" | default "auto" -}}
{{- if ne $server.accelerator "none" -}}
{{- if $values.workers -}}
{{- fail (printf "server.accelerator is %s, and then the group runs in the server's pod; set workers: []" $server.accelerator) -}}
{{- end -}}
{{- if eq $device "cpu" -}}
{{- fail (printf "server.accelerator is %s, but config.device is cpu; leave config.device out, or set server.accelerator: none" $server.accelerator) -}}
{{- end -}}
{{- if gt $tp 1 -}}
{{- fail (printf "server.accelerator is %s and config.tensor-parallel-size %d: shards on several GPUs are not supported yet; use 1" $server.accelerator $tp) -}}
{{- end -}}
{{- if gt (index $config "num-groups" | default 1 | int) 1 -}}
{{- fail (printf "server.accelerator is %s and config.num-groups %d: groups would share one GPU; use 1, and one release for each GPU" $server.accelerator (index $config "num-groups" | int)) -}}
{{- end -}}
{{- if lt ($server.rayCpus | int) 2 -}}
{{- fail (printf "server.accelerator is %s, so that coordinator and shard run in the server's pod, but server.rayCpus is %d; use 2" $server.accelerator ($server.rayCpus | int)) -}}
{{- end -}}
{{- else if eq $device "cuda" -}}
{{- fail "config.device is cuda, but server.accelerator is none; set server.accelerator to nvidia or amd" -}}
{{- end -}}
{{- if and (gt ($server.replicas | int) 1) (gt ($server.rayCpus | int) 0) -}}
{{- fail (printf "server.replicas is %d and server.rayCpus %d: Ray may place the groups of one server in another's pod, whose end would stop its streams; set server.rayCpus: 0 and give the CPUs to workers, or use config.num-groups for more groups behind one server" ($server.replicas | int) ($server.rayCpus | int)) -}}
{{- end -}}
{{- $cpus := mul $server.replicas $server.rayCpus | int -}}
{{- $groups := dict "server" true -}}
{{- range $values.workers -}}
{{- if hasKey $groups .name -}}
{{- fail (printf "workers has two groups %q, or one that is named as the server's; give each a name of its own" .name) -}}
{{- end -}}
{{- $_ := set $groups .name true -}}
{{- $pods := mul .replicas (.numOfHosts | default 1) | int -}}
{{- $cpus = add $cpus (mul $pods .rayCpus) | int -}}
{{- if gt (.maxDisrupted | default 0 | int) $pods -}}
{{- fail (printf "workers.%s.maxDisrupted is %d, but the group has %d pods; use at most that" .name (.maxDisrupted | int) $pods) -}}
{{- end -}}
{{- end -}}
{{- $all := mul $server.replicas $needed (index $config "num-groups" | default 1 | int) | int -}}
{{- if lt $cpus $all -}}
{{- fail (printf "%d groups of a coordinator and %d shards take %d CPUs of Ray's account, and server.rayCpus and workers have %d; raise rayCpus or replicas of workers, or lower config.tensor-parallel-size or num-groups" (mul $server.replicas (index $config "num-groups" | default 1 | int)) $tp $all $cpus) -}}
{{- end -}}
{{- range $role := list "head" "server" -}}
{{- $pods := eq $role "head" | ternary 1 ($server.replicas | int) -}}
{{- if gt (get (get $values $role) "maxDisrupted" | int) $pods -}}
{{- fail (printf "%s.maxDisrupted is %d, but there is %d; use at most that" $role (get (get $values $role) "maxDisrupted" | int) $pods) -}}
{{- end -}}
{{- end -}}
{{- $defaults := dict "heartbeat-timeout" 60 "step-timeout" 10 "recovery-timeout" 300 -}}
{{- range $setting, $default := $defaults -}}
{{- $seconds := index $config $setting | default $default -}}
{{- if le ($server.livenessSeconds | float64) ($seconds | float64) -}}
{{- fail (printf "server.livenessSeconds is %v, so that a server would be restarted within config.%s (%v s), in which it may help itself; use more" $server.livenessSeconds $setting $seconds) -}}
{{- end -}}
{{- end -}}
{{- else if $values.workers -}}
{{- fail "workers belong to the server, and server.enabled is false; set workers: [], and batch.worker for a batch" -}}
{{- end -}}

{{- if $batch.enabled -}}
{{- $worker := $batch.worker -}}
{{- if not (and $batch.existingClaim $batch.input $batch.output) -}}
{{- fail "batch reads and writes files of a volume; set batch.existingClaim, batch.input and batch.output" -}}
{{- end -}}
{{- range $key := list "input" "output" -}}
{{- if not (hasPrefix (printf "%s/" $batch.mountPath) (get $batch $key)) -}}
{{- fail (printf "batch.%s is %s, which is not in the volume at batch.mountPath %s; use a path below it" $key (get $batch $key) $batch.mountPath) -}}
{{- end -}}
{{- end -}}
{{- $cpus := mul $worker.replicas $worker.rayCpus | int -}}
{{- if lt $cpus $needed -}}
{{- fail (printf "a coordinator and %d shards take %d CPUs of Ray's account, and batch.worker has %d; raise batch.worker.rayCpus or replicas, or lower config.tensor-parallel-size" $tp $needed $cpus) -}}
{{- end -}}
{{- if ne $worker.accelerator "none" -}}
{{- if or (gt $tp 1) (gt ($worker.replicas | int) 1) -}}
{{- fail (printf "batch.worker.accelerator is %s: shards on several GPUs are not supported yet; use config.tensor-parallel-size 1 and batch.worker.replicas 1" $worker.accelerator) -}}
{{- end -}}
{{- if eq (index $config "device" | default "auto") "cpu" -}}
{{- fail (printf "batch.worker.accelerator is %s, but config.device is cpu; leave config.device out, or set batch.worker.accelerator: none" $worker.accelerator) -}}
{{- end -}}
{{- else if eq (index $config "device" | default "auto") "cuda" -}}
{{- fail "config.device is cuda, but batch.worker.accelerator is none; set it to nvidia or amd" -}}
{{- end -}}
{{- if and $batch.timeZone (not $batch.schedule) -}}
{{- fail (printf "batch.timeZone is %s, but there is no schedule; set batch.schedule, or leave batch.timeZone out" $batch.timeZone) -}}
{{- end -}}
{{- end -}}

{{- range $kind := list "ingress" "httpRoute" "grpcRoute" -}}
{{- if and (get (get $values $kind) "enabled") (not $server.enabled) -}}
{{- fail (printf "%s leads to the server, and server.enabled is false; set %s.enabled: false" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled needs a host name; set ingress.host" -}}
{{- end -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- if and (get (get $values $kind) "enabled") (not (get (get $values $kind) "parentRefs")) -}}
{{- fail (printf "%s.enabled needs a Gateway; set %s.parentRefs" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "serviceMonitor" "rules" -}}
{{- if and (get $values.monitoring $kind) (or (not (index $config "metrics-port")) (not $server.enabled)) -}}
{{- fail (printf "monitoring.%s needs the server's metrics; set server.enabled: true and config.metrics-port" $kind) -}}
{{- end -}}
{{- end -}}
{{- end }}
