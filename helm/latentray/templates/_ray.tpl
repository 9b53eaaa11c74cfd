{{/* `ray start` of a group. The object store carries next to nothing: weights and KV never pass it. */}}
{{- define "latentray.rayStartParams" -}}
num-cpus: {{ .rayCpus | quote }}
{{- if ne (.accelerator | default "none") "none" }}
num-gpus: "1"
{{- end }}
object-store-memory: "134217728"
{{- end }}

{{/* dict: root, component, data, outlasts. */}}
{{- define "latentray.headGroup" -}}
serviceType: ClusterIP
rayStartParams:
  {{- include "latentray.rayStartParams" (dict "rayCpus" 0) | nindent 2 }}
  dashboard-host: 0.0.0.0
template:
  {{- include "latentray.rayPod" (dict "root" .root "pod" .root.Values.head "component" .component "data" .data "outlasts" .outlasts) | nindent 2 }}
{{- end }}

{{- define "latentray.clusterBasics" -}}
rayVersion: {{ .Values.ray.version }}
authOptions:
  mode: token
  {{- with .Values.ray.authSecret }}
  secretName: {{ . }}
  {{- end }}
{{- end }}

{{/* The RayJob of a batch. */}}
{{- define "latentray.batchJob" -}}
{{- $batch := .Values.batch -}}
{{- $worker := $batch.worker -}}
# Two shells read it: the submitter's, and that of the job on the head.
entrypoint: >-
  latentray batch --config /etc/latentray/latentray.yaml
  --input "'{{ $batch.input }}'" --output "'{{ $batch.output }}'"
  {{- if $batch.allowFailedRows }} --allow-failed-rows{{ end }}
  {{- if $batch.retryFailed }} --retry-failed{{ end }}
{{- if ne $worker.accelerator "none" }}
# the command asks its own machine whether there is a GPU
entrypointNumGpus: 1
{{- end }}
backoffLimit: {{ $batch.backoffLimit }}
activeDeadlineSeconds: {{ $batch.activeDeadlineSeconds | int64 }}
shutdownAfterJobFinishes: true
ttlSecondsAfterFinished: {{ $batch.ttlSecondsAfterFinished | int64 }}
submissionMode: K8sJobMode
submitterPodTemplate:
  metadata:
    labels:
      {{- include "latentray.selectorLabels" . | nindent 6 }}
      app.kubernetes.io/component: batch-submitter
  spec:
    {{- include "latentray.podBasics" . | nindent 4 }}
    restartPolicy: Never
    containers:
      - name: ray-job-submitter
        image: {{ include "latentray.image" (dict "root" . "accelerator" $worker.accelerator) }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        securityContext:
          {{- include "latentray.containerSecurityContext" . | nindent 10 }}
        env:
          {{- include "latentray.baseEnv" . | nindent 10 }}
        resources:
          requests: {cpu: 200m, memory: 512Mi}
          limits: {memory: 1Gi}
        volumeMounts:
          {{- include "latentray.scratchMounts" . | nindent 10 }}
    volumes:
      - name: scratch
        emptyDir:
          sizeLimit: 1Gi
rayClusterSpec:
  {{- include "latentray.clusterBasics" . | nindent 2 }}
  headGroupSpec:
    {{- include "latentray.headGroup" (dict "root" . "component" "batch-head" "data" true) | nindent 4 }}
  workerGroupSpecs:
    - groupName: shards
      replicas: {{ $worker.replicas }}
      minReplicas: {{ $worker.replicas }}
      maxReplicas: {{ $worker.replicas }}
      rayStartParams:
        {{- include "latentray.rayStartParams" $worker | nindent 8 }}
      template:
        {{- include "latentray.rayPod" (dict "root" . "pod" $worker "component" "batch-worker" "accelerator" $worker.accelerator "data" true) | nindent 8 }}
{{- end }}
