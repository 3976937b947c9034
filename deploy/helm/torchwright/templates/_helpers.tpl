{{- define "torchwright.labels" -}}
app.kubernetes.io/name: torchwright
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "torchwright.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "torchwright.confined" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "torchwright.key" -}}
- name: TORCHWRIGHT_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Values.keySecret }}, key: key}
{{- end }}
