{{/* RayCluster: a DNS label that starts with a letter; KubeRay adds to it, so 30 characters at most. */}}
{{- define "latentray.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "latentray" .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-latentray" .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "latentray.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "latentray.fullname" .) "default") -}}
{{- end }}

{{/* Of every pod of the release. */}}
{{- define "latentray.selectorLabels" -}}
app.kubernetes.io/name: latentray
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "latentray.labels" -}}
{{ include "latentray.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* dict: root, accelerator. Without a tag: the one of docker/, by accelerator. */}}
{{- define "latentray.image" -}}
{{- $kind := get (dict "none" "cpu" "nvidia" "cuda" "amd" "rocm") .accelerator -}}
{{- $image := .root.Values.image -}}
{{- printf "%s:%s" $image.repository ($image.tag | default (printf "%s-%s" .root.Chart.AppVersion $kind)) -}}
{{- end }}

{{/* Of pods that only need the commands: one that the nodes have already. */}}
{{- define "latentray.commandImage" -}}
{{- $accelerator := .Values.server.enabled | ternary .Values.server.accelerator .Values.batch.worker.accelerator -}}
{{- include "latentray.image" (dict "root" . "accelerator" $accelerator) -}}
{{- end }}

{{- define "latentray.acceleratorResource" -}}
{{- get (dict "nvidia" "nvidia.com/gpu" "amd" "amd.com/gpu") . -}}
{{- end }}

{{/* The file that the binary reads. JSON values: Helm would write large numbers as 8.6e+09. */}}
{{- define "latentray.configFile" -}}
{{- range $key, $value := .Values.config }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- if .Values.access.apiKeysSecret }}
api-keys: "/etc/latentray-keys/keys.yaml"
{{- end }}
{{- if .Values.access.tlsSecret }}
tls-cert: "/etc/latentray-tls/tls.crt"
tls-key: "/etc/latentray-tls/tls.key"
{{- end }}
{{- end }}

{{/* Mounts and volumes of what protects a server. Files of root that the group may read: fsGroup. */}}
{{- define "latentray.accessMounts" -}}
{{- if .Values.access.apiKeysSecret }}
- name: keys
  mountPath: /etc/latentray-keys
  readOnly: true
{{- end }}
{{- if .Values.access.tlsSecret }}
- name: tls
  mountPath: /etc/latentray-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "latentray.accessVolumes" -}}
{{- with .Values.access.apiKeysSecret }}
- name: keys
  secret:
    secretName: {{ . }}
    defaultMode: 0400
{{- end }}
{{- with .Values.access.tlsSecret }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0400
{{- end }}
{{- end }}

{{- define "latentray.grpcPort" -}}{{ index .Values.config "port" }}{{- end }}
{{- define "latentray.httpPort" -}}{{ index .Values.config "http-port" }}{{- end }}
{{/* Empty without one. */}}
{{- define "latentray.metricsPort" -}}{{- with index .Values.config "metrics-port" }}{{ . }}{{ end }}{{- end }}
{{- define "latentray.tensorParallelSize" -}}{{ index .Values.config "tensor-parallel-size" | default 1 | int }}{{- end }}
